import { Chart, colorOf, ink, type Params } from "../chart";
import type { Front, FrontRow } from "../data";
import { h, list, table, type Cell } from "../dom";
import { bytes, days, dollars, percent, seconds } from "../format";

const WIDE = 30; // times as much on one axis: as powers of ten

const KINDS = ["no other is as cheap and as fast", "others"];

/** What a step, a run and so many tokens cost on other clusters: cost against time. */
export function front(found: Front | null): HTMLElement[] {
  if (!found || !found.rows.length) return [];
  const rows = found.rows;
  const isRun = rows.every((row) => row.cost.days !== null);
  const time = (row: FrontRow) => (isRun ? row.cost.days! : row.step_s);
  const said = (value: number) => (isRun ? days(value) : seconds(value));
  const cost = (row: FrontRow) => (isRun ? row.cost.usd : row.cost.usd_per_step);
  const priced = rows.filter((row) => cost(row) !== null);
  const best = priced.filter((row) => row.pareto).sort((a, b) => time(a) - time(b));
  const others = priced.filter((row) => !row.pareto);
  const label = isRun ? "Dollars of the run against its time" : "Dollars of a step against its time";
  const point = (row: FrontRow) => ({ value: [time(row), cost(row)], name: `${row.devices}: ${row.name}` });
  const make = () => {
    const { text, faint } = ink();
    const axis = (values: number[]) => ({
      type: Math.min(...values) > 0 && Math.max(...values) > WIDE * Math.min(...values) ? "log" : "value",
      scale: true,
      splitLine: { lineStyle: { color: faint } },
    });
    return {
      key: KINDS.map((name, index): [string, string] => [name, colorOf(index)]),
      grid: { left: 84, right: 44, top: 16, bottom: 32 },
      xAxis: { ...axis(priced.map(time)), axisLabel: { formatter: said, color: text, hideOverlap: true } },
      yAxis: { ...axis(priced.map((row) => cost(row)!)), axisLabel: { formatter: dollars, color: text } },
      tooltip: {
        trigger: "item",
        formatter: (at: Params) => {
          const row = (at.seriesIndex ? others : best)[at.dataIndex]!;
          return `${row.devices}: ${said(time(row))}, ${dollars(cost(row)!)}`;
        },
      },
      series: [
        { name: KINDS[0], type: "line", symbolSize: 10, data: best.map(point) },
        { name: KINDS[1], type: "line", symbolSize: 7, lineStyle: { width: 0 }, data: others.map(point) },
      ],
    };
  };
  const unit = `$ for a billion ${found.unit}s`;
  const data: Cell[][] = rows.map((row) => [
    row.devices,
    row.name ?? "",
    seconds(row.step_s),
    row.mfu === null ? "" : percent(row.mfu),
    bytes(row.peak_bytes),
    money(row.cost.usd_per_step),
    money(row.cost[`usd_per_billion_${found.unit}s`] ?? null),
    ...(isRun ? [money(row.cost.usd), days(row.cost.days!)] : []),
    row.pareto ? "yes" : "no",
  ]);
  const head = ["devices", "plan", "step", "MFU", "peak", "$ a step", unit, ...(isRun ? ["$ of the run", "its time"] : []), "on the front"];
  const prices = found.prices.map((price) =>
    price.price_per_hour === null
      ? `${price.device}: no price is known`
      : `${price.device}: ${dollars(price.price_per_hour)} an hour (${price.price_source}, ${price.price_date})`,
  );
  const rowsOf = table(label, head, data);
  // A chart that is made is drawn.
  const drawn = priced.length ? new Chart(label, 320, make, rowsOf).element : rowsOf;
  return [h("h3", {}, "What other devices cost"), drawn, list(prices)];
}

function money(value: number | null): string {
  return value === null ? "" : dollars(value);
}
