"use strict";
// Adds a filter and sorting to tables. The page is complete without this script.
const FEW = 3; // Rows of a table that needs neither.
const make = (tag, parent, properties) =>
  parent.appendChild(Object.assign(document.createElement(tag), properties));

function order(column, descending) {
  const value = (row) => Number(row.cells[column].dataset.value ?? NaN);
  return (first, second) => {
    const [a, b] = [value(first), value(second)];
    if (!isNaN(a) || !isNaN(b)) {
      // A row without a number comes last.
      if (isNaN(a) || isNaN(b)) return isNaN(a) - isNaN(b);
      return descending ? b - a : a - b;
    }
    const [s, t] = [first, second].map((row) => row.cells[column].textContent);
    return s.localeCompare(t) * (descending ? -1 : 1);
  };
}

function control(section, body) {
  const heads = [...section.querySelectorAll("th")];
  const names = heads.map((head) => head.textContent);
  const rows = [...body.rows];
  const texts = rows.map((row) =>
    [...row.cells].map((cell) => cell.textContent).join(" ").toLowerCase());
  let column = -1, descending = false;

  const bar = document.createElement("div");
  bar.className = "controls";
  section.querySelector(".table").before(bar);
  const filter = make("input", bar, { type: "search", placeholder: "Filter rows" });
  filter.setAttribute("aria-label", "Filter rows");
  const label = make("label", bar, { textContent: "Sort by" });
  const select = make("select", label);
  ["the file's order", ...names].forEach((name, index) =>
    make("option", select, { textContent: name, value: index - 1 }));
  const turn = make("button", label, { type: "button", textContent: "↑" });
  turn.setAttribute("aria-label", "Turn the order");
  const count = make("span", bar, { className: "count" });
  count.setAttribute("aria-live", "polite");

  function sort() {
    heads.forEach((head, index) => {
      if (index !== column) head.removeAttribute("aria-sort");
      else head.setAttribute("aria-sort", descending ? "descending" : "ascending");
    });
    select.value = column;
    turn.textContent = descending ? "↓" : "↑";
    body.append(...(column < 0 ? rows : [...rows].sort(order(column, descending))));
  }
  function show() {
    const words = filter.value.toLowerCase().split(/\s+/);
    rows.forEach((row, index) => {
      row.hidden = !words.every((word) => texts[index].includes(word));
    });
    const shown = rows.filter((row) => !row.hidden).length;
    count.textContent = shown === rows.length ? `${shown} rows` : `${shown} of ${rows.length} rows`;
  }
  heads.forEach((head, index) => {
    head.textContent = "";
    const button = make("button", head, { type: "button", textContent: names[index] });
    button.addEventListener("click", () => {
      descending = column === index && !descending;
      column = index;
      sort();
    });
  });
  select.addEventListener("change", () => { column = Number(select.value); sort(); });
  turn.addEventListener("click", () => { descending = !descending; sort(); });
  filter.addEventListener("input", show);
  show();
}

for (const section of document.querySelectorAll("section")) {
  const body = section.querySelector("tbody");
  if (body && body.rows.length > FEW) control(section, body);
}
