/**
 * Amounts and times as people read them.
 */

const GB = 1024 ** 3;

/** Memory in whole GB, or with one digit below 10. */
export function gigabytes(bytes: number): string {
  const amount = bytes / GB;
  return amount < 10 ? amount.toFixed(1).replace(/\.0$/, '') : amount.toFixed(0);
}

/** GPUs with at most two digits: "2", "0.5", "1.25". */
export function gpus(amount: number): string {
  return String(Math.round(amount * 100) / 100);
}

/** A length of time in its two largest units: "2 h 5 min", "45 s". */
export function duration(seconds: number): string {
  const all = Math.max(0, Math.round(seconds));
  if (all < 60) {
    return `${all} s`;
  }
  const minutes = Math.round(all / 60);
  const units: [string, number][] = [
    ['d', 1440],
    ['h', 60],
    ['min', 1]
  ];
  const parts: string[] = [];
  let rest = minutes;
  for (const [unit, size] of units) {
    if (rest >= size && parts.length < 2) {
      parts.push(`${Math.floor(rest / size)} ${unit}`);
      rest %= size;
    } else if (parts.length) {
      break;
    }
  }
  return parts.join(' ');
}

/** A time of the day, with the date if it is not today; `exact` to the second. */
export function clock(seconds: number, now: number, exact = false): string {
  const [when, today] = [new Date(seconds * 1000), new Date(now * 1000)];
  const second = exact ? ({ second: '2-digit' } as const) : {};
  const time = when.toLocaleTimeString(undefined, { hour: '2-digit', minute: '2-digit', ...second });
  if (when.toDateString() === today.toDateString()) {
    return time;
  }
  return `${when.toLocaleDateString(undefined, { month: 'short', day: 'numeric' })} ${time}`;
}

/** What a person means by "2h", "30 min" or "90": seconds; null: it is none of these. */
export function seconds(text: string): number | null {
  const found = /^\s*(\d+(?:\.\d+)?)\s*(s|sec|m|min|h|d)?\s*$/i.exec(text);
  if (!found) {
    return null;
  }
  const size = { s: 1, sec: 1, m: 60, min: 60, h: 3600, d: 86400 }[(found[2] ?? 's').toLowerCase()] ?? 1;
  return Number(found[1]) * size;
}
