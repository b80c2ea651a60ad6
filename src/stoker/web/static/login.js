// Logs a device in by the token after the # of a link, or by its cookie, which browsers do not send with links from other sites.
"use strict";

(() => {
  const entry = document.getElementById("entry");
  const form = document.getElementById("entry-form");
  const field = document.getElementById("entry-token");
  const mistake = document.getElementById("entry-mistake");
  const wait = document.getElementById("entry-wait");
  const wanted = form.elements.namedItem("next").value;
  const TRIED = "stoker-entry-tried";

  const show = (message) => {
    wait.hidden = true;
    form.hidden = false;
    mistake.textContent = message;
    mistake.hidden = !message;
  };

  const hide = () => {
    wait.hidden = false;
    form.hidden = true;
  };

  // Removes the token from the address and the history before it is used.
  const takeToken = () => {
    const token = decodeURIComponent(location.hash.slice(1));
    if (!token.startsWith("stk_")) return "";
    history.replaceState(null, "", location.pathname + location.search);
    return token;
  };

  const post = async (token) => {
    hide();
    try {
      const answer = await fetch("/login", {
        method: "POST",
        headers: { Accept: "application/json" },
        body: new URLSearchParams({ token, next: wanted }),
      });
      const told = await answer.json();
      if (answer.ok) location.replace(told.next);
      else show(told.detail);
    } catch {
      show("The page could not be reached: try again.");
    }
  };

  // The cookie is not sent with a link from a mail or a chat, but with this request: if the device is logged in, open the same
  // address again.
  const lookAgain = async () => {
    const here = location.pathname + location.search;
    try {
      if (sessionStorage.getItem(TRIED) === here) {
        sessionStorage.removeItem(TRIED);
        return;
      }
      hide();
      const answer = await fetch("/login/session", { headers: { Accept: "application/json" } });
      if (answer.ok) {
        sessionStorage.setItem(TRIED, here);
        location.replace(wanted);
        return;
      }
      show("");
    } catch {
      show("");
    }
    field.focus();
  };

  const begin = () => {
    const token = takeToken();
    if (token) post(token);
    else if ("check" in entry.dataset) lookAgain();
  };

  addEventListener("hashchange", () => {
    const token = takeToken();
    if (token) post(token);
  });
  begin();
})();
