"use strict";

(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function stretch(plot, from, to, fill, least = 1) {
    const { left, top, width, height } = plot.bbox;
    const [begun, ended] = [from, to].map((time) => Math.min(Math.max(plot.valToPos(time, "x", true), left), left + width));
    plot.ctx.fillStyle = fill;
    if (ended > left && begun < left + width) plot.ctx.fillRect(begun, top, Math.max(ended - begun, least), height);
  }

  // Behind the curve: windows, what was saved, and what is not known.
  function background(plot, chart, times) {
    const step = times[1] - times[0];
    for (const { from, at, until, hung } of chart.firings) {
      stretch(plot, from, at, colour(hung ? "--hung" : "--window"));
      stretch(plot, at, until, colour("--saved"));
    }
    times.forEach((time, place) => {
      if (chart.curve.unknown[place]) stretch(plot, time, time + step, colour("--unknown"));
      else if (chart.curve.high[place] === null) stretch(plot, time, time + step, colour("--line"));
    });
  }

  // Before it: the threshold, and the numbered moments at which the rule fires.
  function foreground(plot, chart) {
    const { ctx, bbox } = plot;
    const y = Math.round(plot.valToPos(chart.below, "y", true));
    ctx.save();
    ctx.setLineDash([4 * devicePixelRatio, 4 * devicePixelRatio]);
    ctx.strokeStyle = colour("--soft");
    ctx.beginPath();
    ctx.moveTo(bbox.left, y);
    ctx.lineTo(bbox.left + bbox.width, y);
    ctx.stroke();
    ctx.font = `600 ${12 * devicePixelRatio}px system-ui, sans-serif`;
    ctx.textAlign = "left";
    let last = -Infinity;
    for (const { number, at } of chart.firings) {
      const x = plot.valToPos(at, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      stretch(plot, at, at, colour("--fire"), 2 * devicePixelRatio);
      // Numbers that would overlap are left out.
      if (x - last < 24 * devicePixelRatio) continue;
      ctx.fillText(number, x + 4 * devicePixelRatio, bbox.top + 12 * devicePixelRatio);
      last = x;
    }
    ctx.restore();
  }

  // As uPlot's own, with 24 hours: from this many seconds between ticks on, the text, and what is added on a new day.
  const day = "\n{DD} {MMM}";
  const clock = [
    [86400, "{DD} {MMM}", "\n{YYYY}", null, null, null, null, null, 1],
    [60, "{HH}:{mm}", day, null, day, null, null, null, 1],
    [1, "{HH}:{mm}:{ss}", day, null, day, null, null, null, 1],
  ];

  function draw(element) {
    const chart = charts[element.dataset.chart];
    const { low, high, mean } = chart.curve;
    const times = mean.map((_value, place) => chart.begun + (place * (chart.ended - chart.begun)) / mean.length);
    const series = (stroke, width) => ({ stroke, width, points: { show: false }, paths: uPlot.paths.stepped({ align: 1 }) });
    const grid = { stroke: colour("--line"), width: 1 };
    return new uPlot({
      width: element.clientWidth,
      height: 120,
      legend: { show: false },
      // A drag shows a part of the time, in all charts of GPUs; a double click shows all of it again.
      cursor: { y: false, points: { show: false }, ...(element.closest("li") ? {} : { sync: { key: "gpus" } }) },
      scales: { x: { time: true }, y: { range: [-0.03, 1.03] } },
      axes: [
        { stroke: colour("--soft"), grid: { show: false }, ticks: grid, values: clock },
        { stroke: colour("--soft"), grid, ticks: { show: false }, size: 44, splits: [0, 0.5, 1],
          values: (_plot, values) => values.map((value) => `${value * 100}%`) },
      ],
      series: [{}, series(colour("--band"), 1), series(colour("--band"), 1), series(colour("--use"), 1.5)],
      bands: [{ series: [1, 2], fill: colour("--band") }],
      hooks: { drawAxes: [(plot) => background(plot, chart, times)], draw: [(plot) => foreground(plot, chart)] },
    }, [times, high, low, mean], element);
  }

  let plots = [];
  function drawAll() {
    for (const plot of plots) plot.destroy();
    plots = [...document.querySelectorAll("[data-chart]")].map(draw);
  }

  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth !== width) drawAll(); // a phone's toolbars change only the height
    width = innerWidth;
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  drawAll();
})();
