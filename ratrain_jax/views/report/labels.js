// Writes ops' labels into the bars that are wide enough for them, whenever the view has changed.
const LETTER = 6.5  // pixels of a letter, about
const MOST = 1500
const shown = {x: [], y: [], text: [], ink: []}
const [from, to] = [x_range.start, x_range.end]
const pixels = plot.inner_width / (to - from)
const tall = plot.inner_height / Math.abs(y_range.start - y_range.end)
for (const [renderer, height, ink] of bars) {
  if (!renderer.visible || height * tall < 10) continue
  const {x, y, width, op, microbatch} = renderer.data_source.data
  for (let n = 0; n < x.length && shown.x.length < MOST; n++) {
    const [left, right] = [Math.max(x[n], from), Math.min(x[n] + width[n], to)]
    if ((right - left) * pixels < 2 * LETTER) continue
    const [, , , short, layer] = entries[op[n]]
    const number = microbatch[n] >= 0 ? microbatch[n] : layer
    const text = number >= 0 ? `${short}${number}` : short
    if ((right - left) * pixels < LETTER * text.length + 4) continue
    shown.x.push((left + right) / 2)
    shown.y.push(y[n] + height / 2)
    shown.text.push(text)
    shown.ink.push(ink)
  }
}
source.data = shown
