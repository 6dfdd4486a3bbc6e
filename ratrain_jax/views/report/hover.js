// Text of one field of a tooltip. `value` is the bar's number in a column, `format` says what is wanted of it.
const seconds = (s) => {
  if (s == 0) return "0 s"
  const [scale, unit] = s >= 1 ? [1, "s"] : s >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"]
  return `${Number((s * scale).toPrecision(7))} ${unit}`
}
const bytes = (b) => {
  let size = b, unit = "B"
  for (const next of ["KiB", "MiB", "GiB", "TiB"]) {
    if (size < 1024) break
    size /= 1024
    unit = next
  }
  return `${unit == "B" ? size : size.toFixed(1)} ${unit}`
}
switch (format) {
  case "name": return entries[value][0]
  case "layers": return entries[value][1] || "–"
  case "moved": return entries[value][2]
  case "microbatch": return value < 0 ? "–" : `${value}`
  case "bytes": return bytes(value)
  default: return seconds(value)
}
