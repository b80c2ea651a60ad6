// Charts: what each GPU did over the last hour, how a batch size was found, and the figures that jobs printed.
"use strict";

(() => {
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // One kind of chart: removed with its element, redrawn when the width or the colours change.
  class Charts {
    constructor(selector, show) {
      this.selector = selector;
      this.show = show; // shows the charts among these elements
      this.plots = new Map(); // element -> uPlot
      let settled = 0;
      let width = innerWidth;
      addEventListener("resize", () => {
        if (innerWidth === width) return; // toolbars of phones change only the height
        width = innerWidth;
        clearTimeout(settled);
        settled = setTimeout(() => this.redraw(), 200);
      });
      matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
      document.addEventListener("stoker:swapped", () => this.update());
      this.update();
    }

    update() {
      for (const element of [...this.plots.keys()]) if (!element.isConnected) this.drop(element);
      this.show(document.querySelectorAll(this.selector), this.plots);
    }

    redraw() {
      for (const element of [...this.plots.keys()]) this.drop(element);
      this.update();
    }

    drop(element) {
      this.plots.get(element)?.destroy();
      this.plots.delete(element);
    }
  }

  // GPU history: drawn when it comes into view, requested once per machine, refreshed slowly.

  const FRESH_FOR = 45000; // milliseconds; the server has one point a minute
  const histories = new Map(); // host -> { at, answer: Promise }
  const visible = new Set();

  function history(host) {
    const known = histories.get(host);
    if (known && Date.now() - known.at < FRESH_FOR) return known.answer;
    const answer = fetch(`/api/v1/history?host=${encodeURIComponent(host)}`, { headers: { Accept: "application/json" } })
      .then((response) => (response.ok ? response.json() : null))
      .catch(() => null);
    histories.set(host, { at: Date.now(), answer });
    answer.then((found) => { if (!found) histories.delete(host); });
    return answer;
  }

  function historyPlot(element, data) {
    const accent = colour("--accent");
    return new uPlot({
      width: element.clientWidth,
      height: element.clientHeight,
      padding: [3, 0, 1, 0],
      legend: { show: false },
      cursor: { show: false },
      select: { show: false },
      scales: { x: { time: true }, y: { range: [0, 1] } },
      axes: [{ show: false }, { show: false }],
      series: [
        {},
        { stroke: accent, width: 1.5, fill: `${accent}2e`, points: { show: false }, spanGaps: false },
        { stroke: colour("--cool"), width: 1.5, points: { show: false }, spanGaps: false },
      ],
    }, data, element);
  }

  async function drawHistory(element, plots) {
    const { host, gpu, memory } = element.dataset;
    const found = await history(host);
    if (!element.isConnected || !visible.has(element)) return;
    const one = found?.gpus.find((series) => series.gpu === gpu);
    // A line needs two points.
    if (!one || one.utilization.concat(one.memory).filter((value) => value !== null).length < 4) {
      element.dataset.nothing = found ? "No history yet" : "The history is unavailable";
      if (!plots.has(element)) element.classList.add("nothing");
      return;
    }
    element.classList.remove("nothing");
    const total = Number(memory) || Math.max(1, ...one.memory);
    const data = [found.times, one.utilization, one.memory.map((bytes) => (bytes === null ? null : Math.min(1, bytes / total)))];
    if (plots.has(element)) plots.get(element).setData(data);
    else plots.set(element, historyPlot(element, data));
    describe(element, one.utilization);
  }

  function describe(element, utilization) {
    const known = utilization.filter((value) => value !== null);
    if (!known.length) return;
    const percent = (value) => `${Math.round(value * 100)}%`;
    const mean = known.reduce((sum, value) => sum + value, 0) / known.length;
    element.title = `Last hour: used ${percent(mean)} on average, ${percent(Math.max(...known))} at most`;
    element.setAttribute("aria-label", element.title);
  }

  const viewport = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      if (isIntersecting) {
        visible.add(target);
        drawHistory(target, gpus.plots);
      } else visible.delete(target);
    }
  }, { rootMargin: "200px" });

  const gpus = new Charts("[data-chart]", (elements, plots) => {
    for (const element of [...visible]) if (!element.isConnected) visible.delete(element);
    for (const element of elements) viewport.observe(element);
    for (const element of visible) if (!plots.has(element)) drawHistory(element, plots);
  });
  setInterval(() => { if (!document.hidden) for (const element of visible) drawHistory(element, gpus.plots); }, FRESH_FOR + 5000);

  // Batch size: the probes, the line through them, the limit, and the size that was chosen.

  const GIB = 2 ** 30;
  const SIZES = Array.from({ length: 32 }, (_, power) => 2 ** power);
  const gib = (values) => values.map((bytes) => (bytes === null ? null : bytes / GIB));

  function dots(label, name, size, inside = name) {
    const ink = colour(name);
    return { label, stroke: ink, paths: () => null, points: { show: true, size, fill: colour(inside), stroke: ink, width: 2 } };
  }

  function fitOptions(element, fit) {
    // Text follows the font size of the browser.
    const scale = Number.parseFloat(getComputedStyle(document.documentElement).fontSize) / 16;
    const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: `${12 * scale}px system-ui, sans-serif` };
    const most = Math.max(fit.limit, ...fit.line, ...fit.fits, ...fit.oom) / GIB;
    return {
      width: element.clientWidth,
      height: element.clientHeight,
      legend: { show: false },
      cursor: { show: false },
      select: { show: false },
      scales: { x: { time: false, range: (_, low, high) => [0, (high || 1) * 1.06] }, y: { range: [0, most * 1.08 || 1] } },
      axes: [
        { ...axis, label: "batch size", labelSize: 20 * scale, labelFont: axis.font, size: 34 * scale, incrs: SIZES },
        { ...axis, label: "GiB", labelSize: 16 * scale, labelFont: axis.font, size: 44 * scale },
      ],
      series: [
        {},
        { label: "expected", stroke: colour("--cool"), width: 1.5, points: { show: false } },
        { label: "limit", stroke: colour("--attention"), width: 1.5, dash: [6, 4], points: { show: false } },
        dots("chosen", "--accent", 15),
        dots("fits", "--cool", 8),
        dots("does not fit", "--bad", 9, "--card"), // hollow, to be distinguishable without colour
      ],
    };
  }

  new Charts("[data-fit]", (elements, plots) => {
    for (const element of elements) {
      if (plots.has(element) || !element.clientWidth) continue;
      let fit;
      try { fit = JSON.parse(element.dataset.fit); } catch { continue; }
      const limit = fit.sizes.map(() => fit.limit);
      const data = [fit.sizes, gib(fit.line), gib(limit), gib(fit.chosen), gib(fit.fits), gib(fit.oom)];
      plots.set(element, new uPlot(fitOptions(element, fit), data, element));
    }
  });

  // Curves: the figures that jobs print, one chart per figure, one line per job.

  const CURVES_EVERY = 15000; // while a job goes on
  const DASHES = [[], [8, 3], [2, 3], [8, 3, 2, 3]]; // distinguishable without colour, too
  const drawn = new WeakMap(); // element -> { name, axis, lines: [{ label, index, at, values }] }

  const number = (value) => (value === null || value === undefined ? "not a number" : Number(value.toPrecision(4)).toLocaleString([], { maximumSignificantDigits: 4 }));
  const asked = (where) => fetch(where, { headers: { Accept: "application/json" } })
    .then((response) => (response.ok ? response.json() : null))
    .catch(() => null);

  async function curvesOf({ id, name }) {
    const job = await asked(`/api/v1/jobs/${id}`);
    const found = job?.attempts ? await asked(`/api/v1/jobs/${id}/attempts/${job.attempts}/curves`) : null;
    return { name, curves: found?.curves ?? [], whole: found?.whole ?? true, goesOn: !job || ["queued", "held", "running"].includes(job.state) };
  }

  async function loadCurves(panel) {
    const told = await Promise.all(JSON.parse(panel.dataset.curves).map(curvesOf));
    const charts = new Map();
    told.forEach(({ name, curves }, index) => {
      for (const { name: figure, axis, at, values } of curves) {
        if (!charts.has(figure)) charts.set(figure, { name: figure, axis, lines: [] });
        charts.get(figure).lines.push({ label: name, index, at, values });
      }
    });
    showCurves(panel, [...charts.values()], told);
    if (told.some(({ goesOn }) => goesOn)) setTimeout(() => loadWhenSeen(panel), CURVES_EVERY);
  }

  function loadWhenSeen(panel) {
    if (!document.hidden) loadCurves(panel);
    else document.addEventListener("visibilitychange", () => loadWhenSeen(panel), { once: true });
  }

  function showCurves(panel, charts, told) {
    const list = panel.querySelector("[data-curve-list]");
    const note = panel.querySelector("[data-curve-note]");
    if (charts.length) panel.hidden = false;
    const partly = told.filter(({ whole }) => !whole).map(({ name }) => name);
    note.textContent = !charts.length ? "No figures such as loss=1.23 were found in the logs." : partly.length ? `Only the end of the log is here: ${partly.join(", ")}.` : "";
    note.hidden = !note.textContent;
    const before = new Map([...list.children].map((card) => [card.dataset.figure, card]));
    for (const chart of charts) {
      let card = before.get(chart.name);
      if (!card) {
        card = document.createElement("div");
        card.className = "card curve";
        card.dataset.figure = chart.name;
        const title = document.createElement("h3");
        title.textContent = chart.name;
        const plot = document.createElement("div");
        plot.className = "curve-plot";
        plot.setAttribute("role", "img");
        const values = document.createElement("p");
        values.className = "curve-values";
        card.append(title, plot, values);
        list.append(card);
      }
      const plot = card.querySelector(".curve-plot");
      plot.dataset.curve = "";
      drawn.set(plot, chart);
      plot.setAttribute("aria-label", `${chart.name} by ${chart.axis}: ${lastOf(chart)}`);
      curves.drop(plot);
      card.querySelector(".curve-values").textContent = lastOf(chart);
    }
    curves.update();
  }

  const lastOf = ({ axis, lines }) => lines.map(({ label, at, values }) =>
    `${lines.length > 1 ? `${label}: ` : ""}${number(values.at(-1))} at ${axis} ${number(at.at(-1))}`).join(" · ");

  // Axes whose letters follow the font size of the browser.
  function axes(element, label) {
    const scale = Number.parseFloat(getComputedStyle(document.documentElement).fontSize) / 16;
    const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: `${12 * scale}px system-ui, sans-serif` };
    return [
      { ...axis, label, labelSize: 18 * scale, labelFont: axis.font, size: 30 * scale, space: 60 * scale },
      { ...axis, size: 56 * scale, space: 30 * scale },
    ];
  }

  function curvePlot(element, chart) {
    const data = uPlot.join(chart.lines.map(({ at, values }) => [at, values]));
    const words = element.parentElement.querySelector(".curve-values");
    const show = (plot) => {
      const { idx } = plot.cursor;
      if (idx === null || idx === undefined) { words.textContent = lastOf(chart); return; }
      const at = data[0][idx];
      const shown = chart.lines.map(({ label }, line) => [label, data[line + 1][idx]]).filter(([, value]) => value !== undefined);
      words.textContent = `${chart.axis} ${number(at)}: ${shown.map(([label, value]) => (chart.lines.length > 1 ? `${label} ${number(value)}` : number(value))).join(" · ")}`;
    };
    return new uPlot({
      width: element.clientWidth,
      height: Math.max(180, element.clientHeight),
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false } },
      scales: { x: { time: false } },
      axes: axes(element, chart.axis),
      hooks: { setCursor: [show] },
      series: [{}, ...chart.lines.map(({ label, index }) => ({
        label, width: 1.75, stroke: colour(`--curve-${index % 8 + 1}`), dash: DASHES[Math.floor(index / 2) % DASHES.length], points: { show: false }, spanGaps: false,
      }))],
    }, data, element);
  }

  const curves = new Charts("[data-curve]", (elements, plots) => {
    for (const element of elements) {
      if (plots.has(element) || !element.clientWidth || !drawn.has(element)) continue;
      plots.set(element, curvePlot(element, drawn.get(element)));
    }
  });
  for (const panel of document.querySelectorAll("[data-curves]")) loadCurves(panel);
})();
