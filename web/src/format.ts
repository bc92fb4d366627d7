const TIMES: [number, string][] = [[1, "s"], [1e-3, "ms"], [1e-6, "us"], [1e-9, "ns"]];
const SIZES: [number, string][] = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]];
const COUNTS: [number, string][] = [[1e18, "E"], [1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

/** Between a number and its unit: no line ends there. */
const GAP = "\u00a0";

export function digits(value: number): string {
  const size = Math.abs(value);
  return value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : 2).replace(/\.0+$/, "");
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
  return Math.abs(value) < 1e-9 ? `${digits(value * 1e12)}${GAP}ps` : scaled(value, TIMES, "s");
}

export function picoseconds(value: number): string {
  return seconds(value / 1e12);
}

/** `3.21 GiB`. */
export function bytes(value: number): string {
  return scaled(value, SIZES, "B");
}

export function count(value: number): string {
  return scaled(value, COUNTS, "").trim();
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
  return `${(100 * value).toFixed(1)}%`;
}

/** `+3.2 ms`, `-80 us`. */
export function signed(text: (value: number) => string, value: number): string {
  return `${value < 0 ? "-" : "+"}${text(Math.abs(value))}`;
}

export function dollars(value: number): string {
  if (value >= 1) return `$${value.toLocaleString("en-US", { minimumFractionDigits: 2, maximumFractionDigits: 2 })}`;
  const short = Number(value.toPrecision(3));
  return value && value < 1e-8 ? `$${short.toExponential()}` : `$${short.toLocaleString("en-US", { maximumFractionDigits: 10 })}`;
}

/** `waiting for gradients all_reduce (NVLink)`. */
export function cause(found: { what: string; transfer: string; level: string }): string {
  if (!found.transfer) return found.what;
  return `${found.what} for ${found.transfer}${found.level ? ` (${found.level})` : ""}`;
}
