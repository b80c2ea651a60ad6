// The form for submitting: the rows of a sweep, the number of jobs, and a single submission per form.
"use strict";

(() => {
  const form = document.getElementById("submit-form");
  const rows = document.getElementById("sweep-rows");
  const template = document.getElementById("sweep-template");
  const preview = document.getElementById("preview");
  const button = document.getElementById("submit-button");
  const RANGE = /^([+-]?\d+)\.\.([+-]?\d+)(?:\.\.([+-]?\d+))?$/;

  function add() {
    rows.append(template.content.cloneNode(true));
    rows.lastElementChild.querySelector("input").focus();
  }

  // Counted as on the server.
  function count(values) {
    return values.split(/(?<!\\),/).reduce((sum, part) => {
      const range = RANGE.exec(part.trim());
      if (!range) return sum + 1;
      const step = Math.abs(Number(range[3] ?? 1)) || 1;
      return sum + Math.floor(Math.abs(range[2] - range[1]) / step) + 1;
    }, 0);
  }

  function tell() {
    const values = !rows ? [] : [...rows.querySelectorAll("[name=sweep_values]")].map((input) => input.value.trim()).filter(Boolean);
    const jobs = values.reduce((product, text) => product * count(text), 1);
    preview.textContent = values.length ? `Creates ${jobs.toLocaleString()} ${jobs === 1 ? "job" : "jobs"}` : "";
  }

  // The form that edits a job has no sweep.
  document.getElementById("add-sweep")?.addEventListener("click", add);
  rows?.addEventListener("click", (event) => {
    if (!event.target.closest("[data-remove]")) return;
    event.target.closest(".sweep-row").remove();
    document.getElementById("add-sweep").focus();
    tell();
  });
  rows?.addEventListener("input", tell);
  form.addEventListener("submit", (event) => {
    if (form.dataset.sent) event.preventDefault();
    form.dataset.sent = "yes";
    button.disabled = true;
  });
  // Returning to the form starts another submission.
  addEventListener("pageshow", (event) => {
    delete form.dataset.sent;
    button.disabled = false;
    if (event.persisted && rows) form.elements.key.value = [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  });
  document.getElementById("mistakes")?.focus();
  document.querySelector("[aria-invalid]")?.closest("details:not([open])")?.setAttribute("open", "");
  tell();
})();
