// The settings: forms that call the API, and links for viewers with their QR code.
"use strict";

(() => {
  const dialog = document.getElementById("link-dialog");
  const SVG = "http://www.w3.org/2000/svg";

  // Reloads the page's content; open parts and the toast stay.
  async function refresh() {
    const answer = await fetch(location.pathname, { headers: { Accept: "text/html" } });
    if (!answer.ok) return;
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html").getElementById("settings");
    if (!fresh) return;
    htmx.swap(document.getElementById("settings"), fresh.innerHTML, { swapStyle: "morph:innerHTML", swapDelay: 0, settleDelay: 0 });
    Stoker.freshen();
    document.dispatchEvent(new Event("stoker:settings"));
  }

  function values(form) {
    const body = {};
    for (const input of form.elements) {
      if (!input.name) continue;
      if (input.type !== "checkbox") body[input.name] = input.value.trim();
      else (body[input.name] ??= []).push(...(input.checked ? [input.value] : []));
    }
    return body;
  }

  document.addEventListener("submit", async (event) => {
    const form = event.target.closest("form[data-api]");
    if (!form) return;
    event.preventDefault();
    const button = form.querySelector("[type=submit]");
    button.disabled = true;
    const done = await Stoker.call(form.dataset.method, form.dataset.api, values(form));
    button.disabled = false;
    if (!done) return;
    form.reset();
    form.closest("details")?.removeAttribute("open");
    if ("showsLink" in form.dataset) show(done);
    refresh();
  });

  document.addEventListener("htmx:afterRequest", (event) => {
    if (event.detail.successful && event.detail.requestConfig.verb !== "get") refresh();
  });

  // Links

  document.addEventListener("click", async (event) => {
    const button = event.target.closest("[data-link]");
    if (!button) return;
    const done = await Stoker.call("POST", button.dataset.link);
    if (done) show(done);
  });

  function show({ name, link, qr }) {
    document.getElementById("link-title").textContent = `Viewer link of ${name}`;
    const text = document.getElementById("link-text");
    text.textContent = text.href = link;
    const place = document.getElementById("link-qr");
    place.hidden = !qr.length;
    place.replaceChildren(...(qr.length ? [drawn(qr)] : []));
    dialog.showModal();
  }

  function drawn(rows) {
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("viewBox", `0 0 ${rows.length} ${rows.length}`);
    svg.setAttribute("shape-rendering", "crispEdges");
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("d", rows.map((row, y) => [...row].map((cell, x) => (cell === "1" ? `M${x} ${y}h1v1h-1z` : "")).join("")).join(""));
    svg.append(path);
    return svg;
  }

  document.getElementById("link-close").addEventListener("click", () => dialog.close());
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
  // The next person at this screen must not read a closed link.
  dialog.addEventListener("close", () => {
    document.getElementById("link-text").textContent = "";
    document.getElementById("link-text").removeAttribute("href");
    document.getElementById("link-qr").replaceChildren();
  });
  document.getElementById("link-copy").addEventListener("click", async () => {
    const link = document.getElementById("link-text");
    try {
      await navigator.clipboard.writeText(link.href);
      Stoker.toast("The link is copied");
    } catch { // only with https, and with permission
      getSelection().selectAllChildren(link);
      Stoker.toast("The link is selected: copy it from there");
    }
  });
})();
