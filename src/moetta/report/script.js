"use strict";
(() => {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const wish = window.matchMedia("(prefers-color-scheme: dark)");
  const stored = () => { try { return localStorage.getItem("moetta-theme"); } catch { return null; } };
  const show = (theme) => {
    root.dataset.theme = theme;
    button.textContent = theme === "dark" ? "Light" : "Dark";
    button.setAttribute("aria-label", `Switch to ${theme === "dark" ? "light" : "dark"} colours`);
  };
  show(stored() || (wish.matches ? "dark" : "light"));
  wish.addEventListener("change", (event) => { if (!stored()) show(event.matches ? "dark" : "light"); });
  button.hidden = false;
  button.addEventListener("click", () => {
    const theme = root.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem("moetta-theme", theme); } catch { /* a private window: not kept */ }
    show(theme);
  });

  const key = (row, place, kind) => {
    const field = row.children[place];
    const text = field.dataset.sort ?? field.textContent;
    if (kind === "text") return text;
    return text === "" ? null : Number(text);
  };
  for (const table of document.querySelectorAll("table")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, place) => {
      const { kind } = head.dataset;
      head.querySelector("button").addEventListener("click", () => {
        // Numbers start with the largest, names with A; a second click turns the order round.
        const first = kind === "text" ? "ascending" : "descending";
        const now = head.getAttribute("aria-sort");
        const order = now === first ? (first === "ascending" ? "descending" : "ascending") : first;
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", order);
        const sign = order === "ascending" ? 1 : -1;
        const rows = [...table.tBodies[0].rows].map((row) => [key(row, place, kind), row]);
        rows.sort(([a], [b]) => {
          if (a === null || b === null) return (a === null) - (b === null); // blanks last
          return sign * (kind === "text" ? a.localeCompare(b, undefined, { numeric: true }) : a - b);
        });
        table.tBodies[0].append(...rows.map(([, row]) => row));
      });
    });
  }
})();
