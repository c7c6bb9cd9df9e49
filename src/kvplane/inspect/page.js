"use strict";
(() => {
  const facts = JSON.parse(document.getElementById("facts").textContent);
  const root = document.documentElement;
  const canvas = document.getElementById("heat");
  if (!canvas) return;
  const readout = document.getElementById("readout");
  const number = new Intl.NumberFormat("en");
  document.getElementById("scriptless").remove();
  const at = { row: 0, column: 0, shown: false };

  const chosen = (name) => document.querySelector(`input[name="${name}"]:checked`).value;
  const colour = (name) => {
    const hex = getComputedStyle(root).getPropertyValue(name).trim().slice(1);
    return [0, 2, 4].map((place) => parseInt(hex.slice(place, place + 2), 16));
  };

  // a cell is a byte: 255 is "no row", others go from the layer's least to its most
  const rows = facts.layers.map((layer) => {
    const read = (part) => {
      const bytes = Uint8Array.from(atob(part.cells), (letter) => letter.charCodeAt(0));
      const value = (column) =>
        bytes[column] === 255 ? null : part.least + ((part.most - part.least) * bytes[column]) / 254;
      return { least: part.least, most: part.most, value };
    };
    return { layer: layer.layer, kind: layer.kind, key: read(layer.key), value: read(layer.value) };
  });

  const range = (what) => {
    const known = rows.map((row) => row[what]).filter((part) => part.least !== null);
    return [Math.min(...known.map((p) => p.least)), Math.max(...known.map((p) => p.most))];
  };

  function draw() {
    const what = chosen("what");
    const [least, most] = range(what);
    const paint = canvas.getContext("2d");
    const image = paint.createImageData(facts.columns, Math.max(1, rows.length));
    const [low, high] = [colour("--low"), colour("--high")];
    rows.forEach((row, place) => {
      const part = row[what];
      const [from, to] = chosen("scale") === "layer" ? [part.least, part.most] : [least, most];
      for (let column = 0; column < facts.columns; column += 1) {
        const norm = part.value(column);
        const pixel = 4 * (place * facts.columns + column);
        if (norm === null) continue;
        // norms that are equal but for rounding are one colour, not noise
        const share = to - from > to / 1000 ? (norm - from) / (to - from) : 0.5;
        for (let c = 0; c < 3; c += 1) {
          image.data[pixel + c] = Math.round(low[c] + (high[c] - low[c]) * share);
        }
        image.data[pixel + 3] = 255;
      }
    });
    canvas.width = facts.columns;
    canvas.height = Math.max(1, rows.length);
    canvas.style.height = `${Math.max(120, Math.min(520, rows.length * 14))}px`;
    paint.putImageData(image, 0, 0);
    if (at.shown) {
      paint.fillStyle = getComputedStyle(root).getPropertyValue("--oldest");
      paint.fillRect(at.column, at.row, 1, 1);
    }
  }

  function say() {
    const row = rows[at.row];
    if (!row || !facts.columns) return;
    const what = chosen("what");
    const norm = row[what].value(at.column);
    const first = at.column * facts.width;
    const stop = Math.min(facts.position, first + facts.width);
    const where = `layer ${row.layer} (${row.kind}), positions ${number.format(first)} to ` +
      `${number.format(stop - 1)}`;
    readout.textContent = norm === null
      ? `${where}: no row is held`
      : `${where}: mean norm of a ${what} ${norm.toPrecision(4)}`;
    at.shown = true;
    draw();
  }

  function move(rowStep, columnStep) {
    at.row = Math.max(0, Math.min(rows.length - 1, at.row + rowStep));
    at.column = Math.max(0, Math.min(facts.columns - 1, at.column + columnStep));
    say();
  }

  canvas.addEventListener("keydown", (event) => {
    const far = event.shiftKey ? 10 : 1;
    const steps = {
      ArrowUp: [-far, 0], ArrowDown: [far, 0], ArrowLeft: [0, -far], ArrowRight: [0, far],
      Home: [0, -facts.columns], End: [0, facts.columns],
    };
    if (!steps[event.key]) return;
    event.preventDefault();
    move(...steps[event.key]);
  });
  const point = (event) => {
    const box = canvas.getBoundingClientRect();
    at.row = Math.min(rows.length - 1, Math.floor(((event.clientY - box.top) / box.height) * rows.length));
    at.column = Math.min(facts.columns - 1, Math.floor(((event.clientX - box.left) / box.width) * facts.columns));
    move(0, 0);
  };
  canvas.addEventListener("pointermove", point);
  canvas.addEventListener("pointerdown", point);
  for (const input of document.querySelectorAll("input[type=radio]")) {
    input.addEventListener("change", () => (at.shown ? say() : draw()));
  }

  const theme = document.getElementById("theme");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
  const label = () => { theme.textContent = isDark() ? "Light" : "Dark"; };
  theme.hidden = false;
  theme.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    label();
    draw();
  });
  dark.addEventListener("change", () => { label(); draw(); });
  label();
  draw();
})();
