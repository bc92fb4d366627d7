const TIMES: [number, string][] = [[1, "s"], [1e-3, "ms"], [1e-6, "us"], [1e-9, "ns"]];
const SIZES: [number, string][] = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]];
const COUNTS: [number, string][] = [[1e18, "E"], [1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

/** Between a number and its unit: no line ends there. */
const GAP = "\u00a0";

/** As Python rounds: a number that is exactly between two goes to the even one. */
function fixed(value: number, places: number): string {
  const halves = value * 2 ** (places + 1);
  const shift = 10 ** places;
  if (!Number.isInteger(halves) || halves % 2 === 0) return value.toFixed(places);
  const below = Math.floor(value * shift);
  return ((below % 2 === 0 ? below : below + 1) / shift).toFixed(places);
}

/** Three significant digits, as the command line has them. */
export function digits(value: number): string {
  const size = Math.abs(value);
  if (size === 0 || size >= 100) return fixed(value, 0);
  if (size < 1e-4) return fixed(value, 3);
  const text = fixed(value, 2 - Math.floor(Math.log10(size)));
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}

function scaled(value: number, units: [number, string][], last: string): string {
  for (const [unit, name] of units) {
    if (Math.abs(value) >= unit) return `${digits(value / unit)}${GAP}${name}`;
  }
  return `${digits(value)}${GAP}${last}`;
}

/** `3.21 ms`. */
export function seconds(value: number): string {
  if (value === 0) return `0${GAP}s`;
  return Math.abs(value) < 1e-9 ? `${digits(value / 1e-9)}${GAP}ns` : scaled(value, TIMES, "s");
}

export function picoseconds(value: number): string {
  return seconds(value / 1e12);
}

/** `3.21 GiB`. */
export function bytes(value: number): string {
  return Math.abs(value) < 1024 ? `${fixed(value, 0)}${GAP}B` : scaled(value, SIZES, "B");
}

/** `41.2k`, `3.1M`. */
export function count(value: number): string {
  return amount(value, "").replace(GAP, "");
}

/** `41.2 TFLOP`. */
export function amount(value: number, unit: string): string {
  return scaled(value, COUNTS.map(([size, prefix]): [number, string] => [size, `${prefix}${unit}`]), unit);
}

/** `8,910`: whole numbers without a prefix, as far as they are read easily. */
export function plain(value: number): string {
  return value >= 1e7 || value < 100 ? count(value) : Math.round(value).toLocaleString("en-US");
}

/** `3.2 days`, `14 hours`, `25 minutes`. */
export function days(value: number): string {
  if (value >= 2) return `${digits(value)}${GAP}days`;
  const hours = 24 * value;
  return hours >= 2 ? `${digits(hours)}${GAP}hours` : `${digits(60 * hours)}${GAP}minutes`;
}

/** A step between marks of an axis of bytes that reads well: of its largest unit halves, or 1, 2, 5 or 10. */
export function byteStep(most: number, marks: number): number {
  const unit = SIZES.find(([size]) => most >= size)?.[0] ?? 1;
  const wanted = most / unit / marks;
  if (wanted <= 1) return unit * 2 ** Math.ceil(Math.log2(wanted));
  const power = 10 ** Math.floor(Math.log10(wanted));
  return unit * power * [1, 2, 5, 10].find((times) => times * power >= wanted)!;
}

export function rate(value: number): string {
  return `${scaled(value, [[1e12, "TB/s"], [1e9, "GB/s"], [1e6, "MB/s"]], "B/s")}`;
}

export function percent(value: number): string {
  return `${fixed(100 * value, 1)}%`;
}

/** `+3.2 ms`, `-80 us`. */
export function signed(text: (value: number) => string, value: number): string {
  return `${value < 0 ? "-" : "+"}${text(Math.abs(value))}`;
}

/** `$1,234,567`, `$12.30`, `$0.00123`: to the cent, or three significant digits of less. */
export function dollars(value: number): string {
  if (value >= 1000) return `$${fixed(value, 0).replace(/\B(?=(\d{3})+$)/g, ",")}`;
  if (value >= 1 || value === 0) return `$${fixed(value, 2)}`;
  return `$${fixed(value, 2 - Math.floor(Math.log10(value)))}`;
}

/** `waiting for gradients all_reduce (NVLink)`. */
export function cause(found: { what: string; transfer: string; level: string }): string {
  if (!found.transfer) return found.what;
  return `${found.what} for ${found.transfer}${found.level ? ` (${found.level})` : ""}`;
}
