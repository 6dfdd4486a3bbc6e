// Seconds in one unit, with as many digits as tell neighbouring ticks apart.
const step = ticks.length > 1 ? Math.abs(ticks[1] - ticks[0]) * scale : 1
const digits = Math.min(12, Math.max(0, Math.ceil(-Math.log10(step) - 1e-9)))
return (tick * scale).toFixed(digits)
