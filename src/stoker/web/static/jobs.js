// The list of jobs: selecting rows, actions for many, and saved searches.
"use strict";

(() => {
  const SAVED = "stoker-searches";
  const picked = new Set();
  const list = document.getElementById("section-list");
  const box = document.getElementById("q");

  // Selecting rows: the selection survives updates of the list

  function shown() {
    for (const pick of list.querySelectorAll("[data-pick]")) pick.checked = picked.has(pick.value);
    const chosen = list.querySelector("[data-chosen]");
    if (chosen) chosen.textContent = picked.size ? `Actions for ${picked.size} selected` : list.querySelector("[data-named]") ? "Actions for these" : "Actions for all";
  }
  list.addEventListener("change", (event) => {
    if (!event.target.matches("[data-pick]")) return;
    if (event.target.checked) picked.add(event.target.value);
    else picked.delete(event.target.value);
    shown();
  });
  list.addEventListener("stoker:swapped", shown);

  // Actions

  function target() {
    if (picked.size) return { jobs: [...picked] };
    const bar = list.querySelector(".bulk");
    if ("named" in bar.dataset) return { jobs: [...list.querySelectorAll("[data-pick]")].map((pick) => pick.value) };
    return { q: bar.dataset.q };
  }

  async function act(button) {
    const body = { action: button.dataset.bulk, ...target() };
    if (button.dataset.place) body.place = button.dataset.place;
    if (body.action === "tag" || body.action === "untag") {
      const away = body.action === "untag";
      body.tag = await Stoker.ask(away ? "Which tag is removed?" : "Which tag do these jobs get?", away ? "Remove" : "Tag", "Tag");
      if (!body.tag) return;
    }
    if (button.dataset.ask) {
      const answer = await fetch("/api/v1/jobs/bulk", { method: "POST", credentials: "same-origin", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ ...body, dry_run: true }) });
      const told = await answer.json().catch(() => ({}));
      if (!answer.ok || !told.changed) return void Stoker.toast(told.message || told.detail || "The request failed", { bad: true });
      if (!(await Stoker.ask(`${told.message}. Work of running jobs that is not saved is lost.`, `${button.dataset.ask} ${told.changed}`))) return;
    }
    if (await Stoker.call("POST", "/api/v1/jobs/bulk", body)) {
      picked.clear();
      shown();
    }
  }
  list.addEventListener("click", (event) => {
    const button = event.target.closest("[data-bulk]");
    if (button) act(button);
    const select = event.target.closest("[data-select]");
    if (select) {
      const on = list.classList.toggle("selecting");
      select.setAttribute("aria-pressed", on);
      if (!on) picked.clear();
      shown();
    }
    if (event.target.closest("[data-save]")) save();
  });
  document.querySelector("[data-submits]")?.addEventListener("change", (event) => event.target.form.requestSubmit());

  // Saved searches: the address of each is a link that can be shared

  function saved() {
    try { return JSON.parse(localStorage.getItem(SAVED)) || []; } catch { return []; }
  }
  function save() {
    const here = new URLSearchParams(location.search);
    const text = (here.get("q") || list.querySelector(".bulk")?.dataset.q || "").trim();
    if (!text) return void Stoker.toast("There is no search to save: type one first", { bad: true });
    const kept = saved();
    const without = kept.filter((one) => one !== text);
    try { localStorage.setItem(SAVED, JSON.stringify(without.length < kept.length ? without : [...kept, text].slice(-20))); } catch { return; }
    showSaved();
    Stoker.toast(without.length < kept.length ? `Removed: ${text}` : `Saved: ${text}`);
  }
  function showSaved() {
    const nav = document.getElementById("saved");
    nav.replaceChildren(...saved().map((text) => {
      const link = document.createElement("a");
      link.href = `/jobs?q=${encodeURIComponent(text)}`;
      link.textContent = text;
      return link;
    }));
    nav.hidden = !nav.children.length;
  }

  showSaved();
  shown();
  if (location.hash === "#q") box.focus(); // `/` on another page
})();
