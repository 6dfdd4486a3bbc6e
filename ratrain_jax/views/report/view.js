// Whenever the view has changed: draws only the blocks in it, since Bokeh paints all and clamps those outside to the edge; labels
// the bars that are wide enough; and sets neighbours apart where there are so few that their edges do not cover them.
const LETTER = 6.5  // pixels of a letter, about
const MOST = 1500
const [from, to] = [x_range.start, x_range.end]
const pixels = plot.inner_width / (to - from)
const tall = plot.inner_height / Math.abs(y_range.start - y_range.end)
const whole = from <= x_range.reset_start && to >= x_range.reset_end
const shown = {x: [], y: [], text: [], ink: []}

const inView = ({x, width}) => {
  const found = []
  for (let n = 0; n < x.length; n++) if (x[n] < to && x[n] + width[n] > from) found.push(n)
  return found
}

const label = ({x, y, width, op, microbatch}, n, height, ink) => {
  const [left, right] = [Math.max(x[n], from), Math.min(x[n] + width[n], to)]
  if ((right - left) * pixels < 2 * LETTER) return
  const [, , , short, layer] = entries[op[n]]
  const number = microbatch[n] >= 0 ? microbatch[n] : layer
  const text = number >= 0 ? `${short}${number}` : short
  if ((right - left) * pixels < LETTER * text.length + 4) return
  shown.x.push((left + right) / 2)
  shown.y.push(y[n] + height / 2)
  shown.text.push(text)
  shown.ink.push(ink)
}

for (const {view, data_source} of blocks) {
  if (!whole) view.filter.indices = inView(data_source.data)
  else if (view.filter.indices != null) view.filter.indices = null
}
let count = 0
for (const [renderer, height, ink] of bars) {
  if (!renderer.visible) continue
  const {data} = renderer.data_source
  const places = inView(data)
  count += places.length
  if (height * tall < 10) continue
  for (const n of places) if (shown.x.length < MOST) label(data, n, height, ink)
}
source.data = shown
const edge = {value: count < MOST ? "rgba(0, 0, 0, 0.4)" : null}
for (const [{glyph}] of bars) if (glyph.line_color?.value !== edge.value) glyph.line_color = edge
