"use strict";
// Sorts a table by the column whose head is pressed, missing values last.
for (const head of document.querySelectorAll("th button")) head.addEventListener("click", () => {
  const cell = head.closest("th"), body = cell.closest("table").tBodies[0], place = cell.cellIndex;
  const up = cell.getAttribute("aria-sort") !== "ascending";
  for (const other of cell.parentNode.cells) other.removeAttribute("aria-sort");
  cell.setAttribute("aria-sort", up ? "ascending" : "descending");
  const value = row => JSON.parse(row.cells[place].dataset.value);
  const compare = (one, other) => {
    const a = value(one), b = value(other);
    if (a === null || b === null) return (a === null) - (b === null);
    const both = typeof a === "number" && typeof b === "number";
    return (up ? 1 : -1) * (both ? a - b : String(a).localeCompare(String(b), "en", {numeric: true}));
  };
  body.append(...[...body.rows].sort(compare));
});
