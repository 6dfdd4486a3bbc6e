// Bytes in the largest binary unit in which the last tick is at 1 or above.
const units = ["B", "KiB", "MiB", "GiB", "TiB"]
const largest = Math.max(...ticks.map(Math.abs), 1)
const power = Math.min(units.length - 1, Math.floor(Math.log2(largest) / 10))
return `${Number((tick / 2 ** (10 * power)).toPrecision(4))} ${units[power]}`
