// Axes, legends and outlines follow the reader's colour scheme, as the page around them does.
const dark = window.matchMedia("(prefers-color-scheme: dark)")
const paint = () => {
  const [ink, faint, ground] =
    dark.matches ? ["#e6e6e6", "#3c4046", "#17191c"] : ["#1d1f21", "#d9dce0", "#ffffff"]
  for (const axis of axes) {
    axis.major_label_text_color = ink
    axis.axis_label_text_color = ink
    axis.axis_line_color = ink
    axis.major_tick_line_color = ink
    axis.minor_tick_line_color = null
  }
  for (const legend of legends) {
    legend.label_text_color = ink
    legend.inactive_fill_color = ground
  }
  for (const grid of grids) grid.grid_line_color = faint
  for (const glyph of outlines) glyph.line_color = {value: ink}
}
dark.addEventListener("change", paint)
paint()
