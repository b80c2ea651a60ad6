// Reordering the queue: by dragging a grip with a finger or a mouse, or by the arrow keys on it.
"use strict";

(() => {
  const EDGE = 90; // pixels from the edge of the screen within which the page scrolls
  let drag = null;

  const jobs = (list) => [...list.querySelectorAll(":scope > [data-job]")];

  function move(id, neighbour, side) {
    return Stoker.call("POST", `/api/v1/jobs/${encodeURIComponent(id)}/move`, { [side]: neighbour });
  }

  document.addEventListener("pointerdown", (event) => {
    const grip = event.target.closest("[data-grip]");
    if (!grip || drag || (event.pointerType === "mouse" && event.button !== 0)) return;
    const item = grip.closest("[data-job]");
    const list = item.closest("[data-queue]");
    const items = jobs(list);
    grip.setPointerCapture(event.pointerId);
    drag = {
      grip, item, list, items, pointer: event.pointerId, from: items.indexOf(item), to: items.indexOf(item),
      y: event.clientY, began: event.clientY + scrollY, height: item.getBoundingClientRect().height,
      middles: items.map((one) => { const box = one.getBoundingClientRect(); return box.top + box.height / 2 + scrollY; }),
      frame: 0,
    };
    list.classList.add("sorting");
    item.classList.add("dragged");
    drag.frame = requestAnimationFrame(follow);
  });

  function follow() {
    if (!drag) return;
    const low = innerHeight - (innerWidth < 768 ? 64 : 0);
    if (drag.y < EDGE + 56) scrollBy(0, -Math.ceil((EDGE + 56 - drag.y) / 8));
    else if (drag.y > low - EDGE) scrollBy(0, Math.ceil((drag.y - low + EDGE) / 8));
    const by = drag.y + scrollY - drag.began;
    const middle = drag.middles[drag.from] + by;
    drag.to = drag.middles.filter((other, index) => index !== drag.from && other < middle).length;
    drag.item.style.transform = `translateY(${by}px)`;
    drag.items.forEach((one, index) => {
      if (index === drag.from) return;
      const shift = index > drag.from && index <= drag.to ? -drag.height : index < drag.from && index >= drag.to ? drag.height : 0;
      one.style.transform = shift ? `translateY(${shift}px)` : "";
    });
    drag.frame = requestAnimationFrame(follow);
  }

  document.addEventListener("pointermove", (event) => {
    if (drag && event.pointerId === drag.pointer) drag.y = event.clientY;
  });

  function end(dropped) {
    const { item, list, items, from, to, frame } = drag;
    cancelAnimationFrame(frame);
    drag = null;
    list.classList.remove("sorting");
    item.classList.remove("dragged");
    for (const one of items) one.style.transform = "";
    if (dropped && to !== from) {
      const others = items.filter((one) => one !== item);
      // The job stays where it was dropped until the server sends the new order.
      if (to < others.length) others[to].before(item);
      else others.at(-1).after(item);
      if (to > 0) move(item.dataset.job, others[to - 1].dataset.job, "after").then((done) => { if (!done) putBack(item, items, from); });
      else move(item.dataset.job, others[0].dataset.job, "before").then((done) => { if (!done) putBack(item, items, from); });
    }
    document.dispatchEvent(new Event("stoker:free"));
  }

  function putBack(item, items, from) {
    if (items[from + 1]?.isConnected) items[from + 1].before(item);
    else if (items[from - 1]?.isConnected) items[from - 1].after(item);
  }

  document.addEventListener("pointerup", (event) => { if (drag && event.pointerId === drag.pointer) end(true); });
  document.addEventListener("pointercancel", (event) => { if (drag && event.pointerId === drag.pointer) end(false); });

  document.addEventListener("keydown", (event) => {
    if (drag && event.key === "Escape") return void end(false);
    const grip = event.target.closest?.("[data-grip]");
    if (!grip || (event.key !== "ArrowUp" && event.key !== "ArrowDown")) return;
    event.preventDefault();
    const item = grip.closest("[data-job]");
    const items = jobs(item.closest("[data-queue]"));
    const neighbour = items[items.indexOf(item) + (event.key === "ArrowUp" ? -1 : 1)];
    if (!neighbour) return;
    if (event.key === "ArrowUp") neighbour.before(item);
    else neighbour.after(item);
    grip.focus();
    move(item.dataset.job, neighbour.dataset.job, event.key === "ArrowUp" ? "before" : "after");
  });
})();
