// The page of the API: what a link leads to is opened, and requests that only read can be tried.
(() => {
  "use strict";

  const MOST_CHARACTERS = 100_000;

  const open = () => {
    const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (target && target.tagName === "DETAILS") target.open = true;
  };

  const addressOf = (form) => {
    const query = new URLSearchParams();
    let path = form.dataset.path;
    for (const input of form.querySelectorAll("input")) {
      if (input.dataset.place === "path") path = path.replace(`{${input.name}}`, input.value.split("/").map(encodeURIComponent).join("/"));
      else if (input.value) query.set(input.name, input.value);
    }
    return query.size ? `${path}?${query}` : path;
  };

  const show = async (form) => {
    const [status, answer] = [form.querySelector("[role=status]"), form.querySelector("pre")];
    status.textContent = "…";
    try {
      const response = await fetch(addressOf(form), { headers: { Accept: "application/json" }, credentials: "same-origin" });
      const text = await response.text();
      status.textContent = `${response.status} ${response.headers.get("Content-Type") || ""}`;
      let shown = text;
      try {
        shown = JSON.stringify(JSON.parse(text), null, 2);
      } catch {
        // Not JSON: as it is.
      }
      answer.firstElementChild.textContent = shown.slice(0, MOST_CHARACTERS);
      answer.hidden = false;
    } catch {
      status.textContent = "the server does not answer";
    }
  };

  document.addEventListener("submit", (event) => {
    if (!event.target.matches(".try")) return;
    event.preventDefault();
    show(event.target);
  });

  document.addEventListener("DOMContentLoaded", () => {
    for (const form of document.querySelectorAll(".try")) form.hidden = false;
    open();
  });
  addEventListener("hashchange", open);
})();
