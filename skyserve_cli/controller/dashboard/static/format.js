// Numbers and instants for people. Unknown values are a dash.

const DASH = "–";
export const usd = (value, digits = 2) => (value === null || value === undefined ? DASH : `$${value.toFixed(digits)}`);
export const percent = (value, digits = 1) => (value === null || value === undefined ? DASH : `${(100 * value).toFixed(digits)}%`);
export const number = (value, digits = 0) => (value === null || value === undefined ? DASH : value.toFixed(digits));
export const seconds = (value) => {
  if (value === null || value === undefined) return DASH;
  return value < 1 ? `${(1000 * value).toFixed(0)} ms` : `${value.toFixed(2)} s`;
};
// Texts of the marks of an axis, with as many digits as it takes until no two are equal.
export const different = (values, text) => {
  const shown = (digits) => values.map((value) => text(value, digits));
  const enough = [undefined, 1, 2, 3, 4, 5].map(shown).find((texts) => new Set(texts).size === values.length);
  return enough || shown();
};
export const clock = (at) => (at ? new Date(1000 * at).toLocaleString() : DASH);
export const age = (from, to) => {
  if (!from) return DASH;
  const s = Math.max(0, to - from);
  if (s < 90) return `${Math.round(s)} s`;
  if (s < 5400) return `${Math.round(s / 60)} min`;
  return s < 172800 ? `${(s / 3600).toFixed(1)} h` : `${(s / 86400).toFixed(1)} d`;
};
