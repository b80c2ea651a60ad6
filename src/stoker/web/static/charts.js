// Charts: GPU use over an hour, a day, a week or a job's run; the batch-size search; the figures that jobs print.
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

  // Batch size: the probes, the line through them, the limit, and the chosen size.

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
        card = chartCard(chart.name, chart.name);
        list.append(card);
      }
      const plot = card.querySelector(".curve-plot");
      plot.dataset.curve = "";
      drawn.set(plot, chart);
      plot.setAttribute("aria-label", `${chart.name} by ${chart.axis}: ${lastOf(chart)}`);
      curves.drop(plot);
      tell(card.querySelector(".curve-values"), chart);
    }
    curves.update();
  }

  const lastOf = ({ axis, lines }) => lines.map(({ label, at, values }) =>
    `${lines.length > 1 ? `${label}: ` : ""}${number(values.at(-1))} at ${axis} ${number(at.at(-1))}`).join(" · ");

  // The values at the pointer, or the last ones; with several jobs, one row per job in its colour.
  function tell(words, { axis, lines }, place) {
    const found = lines.map(({ label, index, at, values }) => {
      const here = place === undefined ? at.length - 1 : at.findLastIndex((one) => one <= place);
      return { label, index, at: at[here], value: values[here] };
    }).filter(({ at }) => at !== undefined);
    if (lines.length === 1) {
      const [{ at, value } = {}] = found;
      words.textContent = place === undefined ? `${number(value)} at ${axis} ${number(at)}` : `${axis} ${number(at)}: ${number(value)}`;
      return;
    }
    words.replaceChildren(...found.map(({ label, index, at, value }) => {
      const row = document.createElement("span");
      row.className = `curve-value curve-${index % 8 + 1}`;
      row.textContent = `${label}: ${number(value)} at ${axis} ${number(at)}`;
      return row;
    }));
  }

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
    const show = ({ cursor: { idx } }) => tell(words, chart, idx === null || idx === undefined ? undefined : data[0][idx]);
    return new uPlot({
      width: element.clientWidth,
      height: Math.max(180, element.clientHeight),
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false } },
      scales: { x: { time: false } },
      axes: axes(element, chart.axis),
      hooks: { setCursor: [show], ready: [followFinger] },
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

  // GPU use: utilization, memory and power of one GPU or of a job's GPUs, with marks at starts and ends of jobs.

  const USAGE_POINTS = 500;
  const MOST_LINES = 8;
  const FIGURES = [
    { key: "utilization", title: "Utilization", unit: "%", per: 0.01, top: () => 100 },
    { key: "memory", title: "Memory", unit: "GiB", per: GIB, top: ({ memory }) => (memory ? memory / GIB : null) },
    { key: "power", title: "Power", unit: "W", per: 1, top: () => null },
  ];
  const shownUsage = new WeakMap(); // element -> { figure, lines, x, step, spans, asked, minutes }
  const isKnown = (value) => value !== null && value !== undefined;
  const DAY = 86400;

  // Names of jobs come with the history; times are in this browser's time zone.
  const clock = (at, withDay) => new Date(at * 1000).toLocaleString([], { ...(withDay ? { weekday: "short" } : {}), hour: "2-digit", minute: "2-digit" });
  const day = (at) => new Date(at * 1000).toLocaleDateString([], { day: "numeric", month: "short" });

  function startUsage(panel) {
    const asked = JSON.parse(panel.dataset.usage);
    const buttons = [...panel.querySelectorAll("[data-minutes]")];
    const state = { asked, panel, minutes: buttons[0].dataset.minutes, timer: 0, whole: !buttons[0].dataset.minutes };
    for (const button of buttons) {
      button.addEventListener("click", () => {
        state.minutes = button.dataset.minutes;
        for (const one of buttons) one.setAttribute("aria-pressed", String(one === button));
        panel.setAttribute("aria-busy", "true");
        loadUsage(state);
      });
    }
    loadUsage(state);
  }

  async function loadUsage(state) {
    clearTimeout(state.timer);
    const { minutes } = state;
    const where = new URL(state.asked.where, location.href);
    where.searchParams.set("points", USAGE_POINTS);
    if (minutes) where.searchParams.set("minutes", minutes);
    const found = await asked(where);
    if (minutes !== state.minutes) return;
    state.panel.removeAttribute("aria-busy");
    if (found || !state.panel.querySelector(".curve")) showUsage(state, found);
    if (!state.asked.goesOn) return;
    clearTimeout(state.timer);
    state.timer = setTimeout(() => {
      if (!document.hidden) loadUsage(state);
      else document.addEventListener("visibilitychange", () => loadUsage(state), { once: true });
    }, FRESH_FOR);
  }

  function showUsage(state, found) {
    const { panel } = state;
    const list = panel.querySelector("[data-usage-list]");
    const gpus = found?.gpus.slice(0, MOST_LINES) ?? [];
    const figures = FIGURES.filter(({ key }) => gpus.some((gpu) => gpu[key].some(isKnown)));
    const note = panel.querySelector("[data-usage-note]");
    const more = (found?.gpus.length ?? 0) - gpus.length;
    note.textContent = !found ? "The history is unavailable." : !figures.length ? "There are no readings of this time." : more > 0 ? `Only ${gpus.length} of ${gpus.length + more} GPUs are drawn.` : "";
    note.hidden = !note.textContent;
    if (figures.length) panel.hidden = false;
    if (state.whole && !state.minutes && found) {
      // Periods shorter than its run.
      const ran = found.times.length * found.step;
      for (const button of panel.querySelectorAll("[data-minutes]")) button.hidden = Number(button.dataset.minutes) >= ran;
      panel.querySelector(".ranges").hidden = ran <= 60;
    }
    for (const card of [...list.children]) if (!figures.some(({ key }) => key === card.dataset.figure)) card.remove();
    for (const figure of figures) {
      let card = list.querySelector(`[data-figure="${figure.key}"]`);
      if (!card) {
        card = chartCard(figure.key, `${figure.title}, ${figure.unit}`);
        list.append(card);
      }
      const plot = card.querySelector(".curve-plot");
      plot.dataset.usagePlot = "";
      const lines = gpus.map((gpu) => ({
        label: state.asked.names[gpu.gpu] ?? gpu.gpu,
        values: gpu[figure.key].map((value) => (isKnown(value) ? value / figure.per : null)),
        peaks: gpu[`${figure.key}_peak`].map((value) => (isKnown(value) ? value / figure.per : null)),
      }));
      const half = found.step * 30; // a point stands for its minutes: it is drawn in their middle
      const chart = { figure, lines, x: found.times.map((at) => at + half), half, step: found.step, spans: found.jobs, asked: state.asked, ofJob: state.whole };
      shownUsage.set(plot, chart);
      card.querySelector(".curve-values").textContent = usageInWords(chart);
      plot.setAttribute("aria-label", `${figure.title}: ${usageInWords(chart)}`);
      usagePlots.drop(plot);
    }
    usagePlots.update();
    showSpans(panel, found);
    showKey(panel, gpus.map(({ gpu }) => state.asked.names[gpu] ?? gpu));
  }

  function chartCard(figure, titled) {
    const card = document.createElement("div");
    card.className = "card curve";
    card.dataset.figure = figure;
    const title = document.createElement("h3");
    title.textContent = titled;
    const plot = document.createElement("div");
    plot.className = "curve-plot";
    plot.setAttribute("role", "img");
    const values = document.createElement("p");
    values.className = "curve-values";
    card.append(title, plot, values);
    return card;
  }

  // The legend of the GPUs.
  function showKey(panel, labels) {
    const key = panel.querySelector("[data-usage-key]");
    if (!key) return;
    key.hidden = labels.length < 2;
    key.replaceChildren(...labels.map((label, line) => {
      const row = document.createElement("li");
      row.className = `curve-${line % 8 + 1}`;
      row.textContent = label;
      return row;
    }));
  }

  function showSpans(panel, found) {
    const box = panel.querySelector("[data-usage-jobs]");
    if (!box || !found) return;
    box.hidden = !found.jobs.length;
    const long = found.times.length * found.step > 1440;
    box.querySelector("ol").replaceChildren(...found.jobs.slice(0, 20).map((span) => {
      const row = document.createElement("li");
      const link = document.createElement("a");
      link.href = `/jobs/${span.job}`;
      link.textContent = span.name;
      const when = document.createElement("span");
      when.className = "quiet";
      when.textContent = `${clock(span.started, long)} to ${span.ended === null ? "now" : clock(span.ended, long)}${span.outcome ? `, ${span.outcome}` : ""}`;
      link.append(" ", when);
      row.append(link);
      return row;
    }));
  }

  const rounded = (value) => Number(value.toPrecision(3)).toLocaleString([], { maximumSignificantDigits: 3 });

  function usageInWords({ figure, lines }) {
    const told = lines.map(({ label, values, peaks }) => {
      const known = values.filter(isKnown);
      if (!known.length) return null;
      const mean = known.reduce((sum, value) => sum + value, 0) / known.length;
      const peak = Math.max(...peaks.filter(isKnown));
      return `${lines.length > 1 ? `${label}: ` : ""}${rounded(mean)} ${figure.unit} on average, ${rounded(peak)} ${figure.unit} at most`;
    });
    return told.filter(isKnown).join(" · ");
  }

  const inSpan = (at, half) => ({ started, ended }) => started <= at + half && (ended === null || ended >= at - half);
  const spanName = ({ name, attempt }, ofJob) => (ofJob ? `attempt ${attempt}` : name);

  // Starts and ends of jobs: a line for each, with the name if there is room.
  function drawSpans(plot, { spans, half, x, ofJob }) {
    const { ctx, bbox } = plot;
    const [low, high] = [x[0] - half, x.at(-1) + half];
    const line = (at, dash) => {
      if (at < low || at > high) return;
      const left = Math.round(plot.valToPos(at, "x", true));
      ctx.setLineDash(dash);
      ctx.beginPath();
      ctx.moveTo(left, bbox.top);
      ctx.lineTo(left, bbox.top + bbox.height);
      ctx.stroke();
    };
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = colour("--quiet");
    ctx.lineWidth = devicePixelRatio;
    ctx.font = plot.axes[0].font[0];
    ctx.textBaseline = "top";
    ctx.textAlign = "left";
    const small = 4 * devicePixelRatio;
    let free = bbox.left + bbox.width; // the room for a name ends where the next job begins
    for (const span of spans) {
      line(span.started, []);
      if (span.ended !== null) line(span.ended, [small, small]);
      const begins = Math.max(bbox.left, plot.valToPos(span.started, "x", true));
      const name = spanName(span, ofJob);
      if (begins + ctx.measureText(name).width + 2 * small < free) ctx.fillText(name, begins + small, bbox.top + small / 2);
      free = Math.min(free, begins);
    }
    ctx.restore();
  }

  function usagePlot(element, chart) {
    const { figure, lines, x, half, step, spans, ofJob } = chart;
    const words = element.parentElement.querySelector(".curve-values");
    const single = lines.length === 1;
    const long = x.length * step > 1440;
    const show = (plot) => {
      const { idx } = plot.cursor;
      if (!isKnown(idx)) { words.textContent = usageInWords(chart); return; }
      const value = (found) => (isKnown(found) ? `${rounded(found)} ${figure.unit}` : "unknown");
      const told = lines.map(({ label, values, peaks }) => {
        const most = step > 1 && isKnown(peaks[idx]) ? `, at most ${value(peaks[idx])}` : "";
        return `${single ? "" : `${label} `}${value(values[idx])}${most}`;
      });
      const jobs = spans.filter(inSpan(x[idx], half)).slice(0, 3).map((span) => spanName(span, ofJob));
      words.textContent = [`${clock(x[idx] - half, long)}: ${told.join(" · ")}`, ...jobs].join(" · ");
    };
    const top = figure.top(chart.asked);
    const most = Math.max(top ?? 0, ...lines.flatMap(({ peaks }) => peaks.filter(isKnown)));
    // A reading between two gaps has no line: it is a dot.
    const alone = (values) => values.flatMap((value, at) => (isKnown(value) && !isKnown(values[at - 1]) && !isKnown(values[at + 1]) ? [at] : []));
    const drawnLine = (values, label, index, options) => ({
      label, stroke: colour(`--curve-${index % 8 + 1}`), spanGaps: false,
      points: { show: true, size: 5, fill: colour(`--curve-${index % 8 + 1}`), filter: () => alone(values) }, ...options,
    });
    const main = FIGURES.indexOf(figure);
    const series = lines.map(({ values, label }, line) => drawnLine(values, label, single ? main : line, { width: 1.75, dash: single ? [] : DASHES[Math.floor(line / 2) % DASHES.length] }));
    const data = [x, ...lines.map(({ values }) => values)];
    if (single && step > 1) {
      data.push(lines[0].peaks);
      series.push(drawnLine(lines[0].peaks, "peak", main, { width: 1, dash: [2, 3] }));
    }
    const [across, up] = axes(element, "");
    return new uPlot({
      width: element.clientWidth,
      height: Math.max(180, element.clientHeight),
      padding: [null, 24, null, null], // half of the last time
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false }, sync: { key: "usage" } },
      scales: { x: { time: true, range: [x[0] - half, x.at(-1) + half] }, y: { range: [0, most * 1.12 || 1] } },
      axes: [
        { ...across, label: undefined, values: (_, splits, _axis, _space, between) => splits.map((at) => (between >= DAY || new Date(at * 1000).getHours() + new Date(at * 1000).getMinutes() === 0 ? day(at) : clock(at))) },
        { ...up, size: up.size * 0.75, values: (_, splits) => splits.map((value) => value.toLocaleString()) },
      ],
      hooks: { setCursor: [show], draw: [(plot) => drawSpans(plot, chart)], ready: [followFinger] },
      series: [{}, ...series],
    }, data, element);
  }

  // Sliding a finger over a chart shows the values below it; sliding up and down scrolls the page.
  function followFinger(plot) {
    plot.over.addEventListener("touchmove", ({ touches }) => {
      const { left, width } = plot.over.getBoundingClientRect();
      plot.setCursor({ left: Math.min(width, Math.max(0, touches[0].clientX - left)), top: 10 });
    }, { passive: true });
  }

  const usagePlots = new Charts("[data-usage-plot]", (elements, plots) => {
    for (const element of elements) {
      if (plots.has(element) || !element.clientWidth || !shownUsage.has(element)) continue;
      plots.set(element, usagePlot(element, shownUsage.get(element)));
    }
  });
  for (const panel of document.querySelectorAll("[data-usage]")) startUsage(panel);
})();
