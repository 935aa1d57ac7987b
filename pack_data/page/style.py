"""The colours, the style sheet and the script of a page; all of them stand in the page itself."""

# Neighbours differ in lightness by at least 12 of 100, so that a picture printed in grey can be read.
FILLS = ("#1d4e89", "#f2a541", "#4f9d69", "#7b2d43", "#b8d8e8", "#c65f3f", "#e8dcc0", "#5c5c8a", "#c9a0dc")
DARK_FILLS = ("#5b93d6", "#f2a541", "#2f7a4d", "#e58aa3", "#b8d8e8", "#b5522f", "#e8dcc0", "#8383c2", "#d9b8ea")
DASHES = ("", "7 3", "2 3", "9 3 2 3", "14 4", "4 4", "1 2", "12 3 2 3 2 3", "16 4 2 4")

# What a saved picture takes with it.
DRAWING = "\n".join(
    [
        "svg{font:12px system-ui,sans-serif}",
        "svg text{fill:#1f2328}",
        "svg .t{font-size:15px;font-weight:600}",
        "svg .g{stroke:#d5d9de;stroke-width:1}",
        "svg .a{stroke:#59636e;stroke-width:1;fill:none}",
        "svg .e{stroke:#1f2328;stroke-width:1.4;fill:none}",
        "svg .v{stroke:#59636e;stroke-width:1.2;stroke-dasharray:5 4;fill:none}",
        "svg .pad{fill:#ffffff;stroke:#8b949e;stroke-width:.6}",
        "svg .hatch{stroke:#8b949e;stroke-width:1}",
        "svg .l{fill:none;stroke-width:1.8}",
        "svg .edge{stroke:#ffffff;stroke-width:.6}",
        "svg text.on{fill:#ffffff}",
        "svg .far{opacity:0}",
        "svg .far:hover{opacity:1}",
        "svg .h:hover{stroke:#000000;stroke-width:1.6}",
        *(f"svg .s{number}{{fill:{fill}}}" for number, fill in enumerate(FILLS)),
        *(
            f"svg .l{number}{{stroke:{fill}" + (f";stroke-dasharray:{dash}" if dash else "") + "}"
            for number, (fill, dash) in enumerate(zip(FILLS, DASHES))
        ),
    ]
)

_DARK_DRAWING = "\n".join(
    [
        "svg text,svg text.on{fill:#e6edf3}",
        "svg .g{stroke:#30363d}",
        "svg .a,svg .v{stroke:#9198a1}",
        "svg .e{stroke:#e6edf3}",
        "svg .pad{fill:#0d1117;stroke:#6e7681}",
        "svg .hatch{stroke:#6e7681}",
        "svg .edge{stroke:#0d1117}",
        "svg .h:hover{stroke:#ffffff}",
        *(f"svg .s{number}{{fill:{fill}}}" for number, fill in enumerate(DARK_FILLS)),
        *(f"svg .l{number}{{stroke:{fill}}}" for number, fill in enumerate(DARK_FILLS)),
    ]
)

PAGE = (
    """
:root{color-scheme:light dark}
body{font:16px/1.5 system-ui,sans-serif;margin:0 auto;padding:1.5rem;max-width:76rem;background:#fff;color:#1f2328}
h1{font-size:1.6rem;margin:.2rem 0}h2{font-size:1.25rem;margin:2.2rem 0 .4rem;border-bottom:1px solid #d5d9de}
p{max-width:50rem;margin:.5rem 0}nav{font-size:.9rem}nav a{margin-right:1rem}a{color:#0b57a4}
.note{font-size:.85rem;color:#59636e;margin:.15rem 0}
.scroll{overflow:auto;max-height:32rem;margin:1rem 0 .2rem}
thead th{position:sticky;top:0;background:#fff}
table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums}
caption{text-align:left;font-weight:600;padding:.2rem 0}
th,td{padding:.15rem .5rem;text-align:right;border-bottom:1px solid #d5d9de;white-space:nowrap}
th.w,td.w{text-align:left}td.w{white-space:normal;min-width:7rem}
th button{font:inherit;font-weight:600;color:inherit;background:none;border:0;padding:0;cursor:pointer;
text-align:inherit}
th button::after{content:"\\2195";opacity:.3;font-weight:400}
th[aria-sort=ascending] button::after{content:"\\2191";opacity:1}
th[aria-sort=descending] button::after{content:"\\2193";opacity:1}
figure{margin:1.2rem 0 .6rem;max-width:760px}figure svg{width:100%;height:auto;display:block}
figure button{font-size:.8rem;color:inherit;background:none;border:1px solid #8b949e;border-radius:.3rem;cursor:pointer}
@media (prefers-color-scheme:dark){
body{background:#0d1117;color:#e6edf3}thead th{background:#0d1117}a{color:#6cb0ff}h2,th,td{border-color:#30363d}
.note{color:#9198a1}
"""
    + _DARK_DRAWING
    + """
}
@media print{figure button,nav{display:none}.scroll{max-height:none}
th button::after{content:""}figure,tr{break-inside:avoid}}
"""
)

# Sorts a table by the column whose head is pressed, missing values last; saves a picture as an SVG file.
SCRIPT = """
"use strict";
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
for (const button of document.querySelectorAll("figure button")) button.addEventListener("click", () => {
  const svg = button.closest("figure").querySelector("svg").cloneNode(true);
  const style = document.createElementNS("http://www.w3.org/2000/svg", "style");
  style.textContent = document.getElementById("drawing").textContent;
  svg.prepend(style);
  const link = document.createElement("a");
  const text = new XMLSerializer().serializeToString(svg);
  link.href = URL.createObjectURL(new Blob([text], {type: "image/svg+xml"}));
  link.download = button.dataset.file;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
});
"""
