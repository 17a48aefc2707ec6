"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const thin = "\u202f";
  const css = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const count = (n) => String(Math.round(n)).replace(/\B(?=(\d{3})+$)/g, thin);

  // Figures name colours as CSS variables; plotly wants values, those of the present colour scheme.
  const paint = (value) => {
    if (Array.isArray(value)) return value.map(paint);
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, paint(inner)]));
    }
    return typeof value === "string" && /^var\(--[\w-]+\)$/.test(value) ? css(value.slice(4, -1)) : value;
  };
  const coarse = matchMedia("(pointer: coarse)").matches;
  const config = { displaylogo: false, responsive: true, modeBarButtons: [["toImage", "resetScale2d"]] };
  const finish = (layout) => {
    const family = getComputedStyle(document.body).fontFamily;
    layout.font = { ...layout.font, family };
    layout.hoverlabel = { ...layout.hoverlabel, font: { ...layout.hoverlabel.font, family } };
    layout.modebar = { bgcolor: "rgba(0,0,0,0)", color: css("--axis"), activecolor: css("--ink") };
    layout.dragmode = coarse ? false : "zoom";
    return layout;
  };

  // Ticks of the slots axis: slots, and below them the share of all experts; as many as there is room for.
  const slotTicks = (full, from, to, width) => {
    const room = Math.max(2, Math.floor(width / 52));
    const step = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.25, 0.5].find((s) => (to - from) / s <= room) || 1;
    const at = [];
    for (let i = Math.ceil(Math.max(from, 0) / step); i * step <= to; i++) at.push(i * step);
    return {
      tickvals: at,
      ticktext: at.map((share) => `${count(share * full)}<br>${(100 * share).toFixed(step < 0.01 ? 1 : 0)}${thin}%`),
    };
  };

  const draw = (host, figure, hidden, empty) => {
    host.classList.toggle("empty", !figure);
    if (!figure) {
      Plotly.purge(host);
      host.textContent = empty;
      return;
    }
    if (!host.data) host.textContent = "";
    const { data: traces, layout } = paint(figure);
    for (const trace of traces) trace.visible = !hidden.has(trace.legendgroup);
    const full = layout.meta ? layout.meta.full : undefined; // 0: a heat map, nothing to zoom
    const ticks = (from, to) => slotTicks(full, from, to, host.clientWidth - 70);
    if (full) Object.assign(layout.xaxis, ticks(...layout.xaxis.range), { tickmode: "array" });
    Plotly.react(host, traces, finish(layout), { ...config, displayModeBar: full === 0 || host.clientWidth < 400 ? false : "hover" });
    if (!full || host.dataset.zoom) return;
    host.dataset.zoom = "on";
    host.on("plotly_relayout", (event) => {
      if (!Object.keys(event).some((key) => key.startsWith("xaxis.range"))) return;
      const { tickvals, ticktext } = ticks(...host.layout.xaxis.range);
      Plotly.relayout(host, { "xaxis.tickvals": tickvals, "xaxis.ticktext": ticktext });
    });
  };

  const heatmap = (cells, width) => {
    const labels = cells.map((cell) => cell.label);
    const layers = [...new Set(cells.flatMap((cell) => cell.layers.map(([layer]) => layer)))].sort((a, b) => a - b);
    const rows = cells.map((cell) => {
      const rates = new Map(cell.layers);
      return layers.map((layer) => rates.get(layer) ?? null);
    });
    const safe = (label) => label.replace(/&/g, "&amp;").replace(/</g, "&lt;");
    return {
      data: [{
        type: "heatmap", x: layers.map(String), y: labels.map((_, i) => i), z: rows, zmin: 0, zmax: 1, xgap: width / layers.length < 20 ? 0 : 1, ygap: 2,
        colorscale: [[0, css("--heat0")], [0.33, css("--heat1")], [0.67, css("--heat2")], [1, css("--heat3")]],
        colorbar: { tickformat: ".0%", thickness: 10, outlinewidth: 0, len: 1, title: { text: "" } },
        text: cells.map((cell, i) => layers.map((layer, j) =>
          `${safe(cell.label)}, layer ${layer}<br>hit rate ${rows[i][j] === null ? "–" : (100 * rows[i][j]).toFixed(1) + thin + "%"}`)),
        hovertemplate: "%{text}<extra></extra>",
      }],
      layout: {
        meta: { full: 0 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
        font: { color: "var(--ink-2)", size: 12.5 },
        hoverlabel: { bgcolor: "var(--panel)", bordercolor: "var(--axis)", font: { color: "var(--ink)" }, align: "left" },
        margin: { l: 8, r: 8, t: 8, b: 8 },
        xaxis: { title: { text: "layer" }, showgrid: false, zeroline: false, automargin: true, type: "category", nticks: Math.max(4, Math.floor(width / 32)), tickangle: 0, ticks: "" },
        yaxis: {
          automargin: true, autorange: "reversed", showgrid: false, zeroline: false, tickvals: labels.map((_, i) => i), ticktext: labels.map(safe), ticks: "",
        },
      },
    };
  };

  const settings = [...document.querySelectorAll(".setting-block")].map((block) => {
    const own = data.settings[Number(block.dataset.setting)];
    const hidden = new Set();
    let level = Object.keys(own.levels)[0];
    const size = block.querySelector("select.size");
    const redraw = () => {
      for (const host of block.querySelectorAll(".plot")) {
        if (host.dataset.chart === "heat") continue;
        draw(host, own.levels[level][host.dataset.chart], hidden, own.empty);
      }
      redrawHeat();
      for (const span of block.querySelectorAll(".at")) span.textContent = own.levels[level].at;
    };
    const redrawHeat = () => {
      const host = block.querySelector('[data-chart="heat"]');
      if (!host) return;
      const cells = own.cells.filter((cell) => String(cell.level) === level && cell.size === size.value
        && cell.layers.length && !hidden.has(String(cell.series)));
      cells.sort((a, b) => a.series - b.series);
      if (cells.length) host.style.height = `${90 + 26 * cells.length}px`;
      draw(host, cells.length ? heatmap(cells, host.clientWidth) : null, hidden, "No cell of this size tells its layers apart.");
    };
    const levels = [...block.querySelectorAll(".levels button")];
    for (const button of levels) {
      button.addEventListener("click", () => {
        level = button.dataset.level;
        for (const other of levels) other.setAttribute("aria-pressed", String(other === button));
        redraw();
      });
    }
    for (const button of block.querySelectorAll(".legend button")) {
      button.addEventListener("click", () => {
        const show = hidden.delete(button.dataset.series);
        if (!show) hidden.add(button.dataset.series);
        button.setAttribute("aria-pressed", String(show));
        redraw();
      });
    }
    if (size) size.addEventListener("change", redrawHeat);
    table(block, own.cells);
    return redraw;
  });

  function table(block, cells) {
    const grid = block.querySelector("table.cells");
    const body = grid.tBodies[0];
    const heads = [...grid.tHead.rows[0].cells];
    heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const value = (row) => row.cells[column].dataset.v;
      const order = (a, b) => {
        const [x, y] = [value(a), value(b)];
        if (x === "" || y === "") return (x === "") - (y === ""); // unknown stays last
        return (up ? 1 : -1) * (column && !Number.isNaN(x - y) ? x - y : x.localeCompare(y));
      };
      body.append(...[...body.rows].sort(order));
    }));
    const filters = [...block.querySelectorAll(".filters select")];
    const filter = () => {
      for (const row of body.rows) {
        row.hidden = filters.some((select) => select.value && row.dataset[select.dataset.by] !== select.value);
      }
    };
    for (const select of filters) select.addEventListener("change", filter);
    const panel = block.querySelector(".parts");
    body.addEventListener("click", (event) => {
      const row = event.target.closest("tr");
      const opened = row.classList.contains("chosen");
      for (const other of body.querySelectorAll(".chosen")) {
        other.classList.remove("chosen");
        other.querySelector(".open").setAttribute("aria-expanded", "false");
      }
      panel.hidden = opened;
      if (opened) return;
      row.classList.add("chosen");
      row.querySelector(".open").setAttribute("aria-expanded", "true");
      panel.replaceChildren(...details(cells[Number(row.dataset.cell)]));
    });
  }

  function details(cell) {
    const make = (tag, text) => Object.assign(document.createElement(tag), { textContent: text });
    const grid = make("table", "");
    const head = grid.createTHead().insertRow();
    for (const name of ["", ...data.partColumns]) head.append(make("th", name));
    const body = grid.createTBody();
    for (const [name, ...values] of cell.parts) {
      const row = body.insertRow();
      row.append(make("th", name), ...values.map((value) => make("td", value)));
    }
    return [make("h3", cell.title), grid];
  }

  const all = () => settings.forEach((redraw) => redraw());
  all();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", all);
  let timer = 0;
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    clearTimeout(timer);
    timer = setTimeout(all, 150);
  });
})();
