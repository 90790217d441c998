// What templates and htmx do not do: two controls for one number, sorted tables, and answers that are no success shown where they belong.
(() => {
  "use strict";

  document.addEventListener("input", (event) => {
    const other = event.target.dataset.mirrors;
    if (other) document.getElementById(other).value = event.target.value;
    const chosen = document.getElementById(`target-${event.target.id.replace(/-slider$/, "")}`);
    if (chosen) chosen.checked = true;
  });

  // Browsers have a clipboard on secure pages only; elsewhere the buttons stay hidden.
  document.addEventListener("DOMContentLoaded", () => {
    if (!navigator.clipboard) return;
    for (const button of document.querySelectorAll("[data-copy]")) button.hidden = false;
  });

  document.addEventListener("click", async (event) => {
    const button = event.target.closest("[data-copy]");
    if (!button) return;
    const command = button.closest("p").nextElementSibling;
    try {
      await navigator.clipboard.writeText(command.innerText);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(command);
    }
  });

  // The order of a table, which has to outlast the rows that replace it every few seconds.
  let sorted = null;

  const sortRows = () => {
    const heads = [...document.querySelectorAll("th:has([data-sort])")];
    for (const head of heads) head.removeAttribute("aria-sort");
    const head = sorted && heads.find((each) => each.innerText === sorted.title);
    if (!head) return;
    head.setAttribute("aria-sort", sorted.ascending ? "ascending" : "descending");
    const place = [...head.parentNode.children].indexOf(head);
    const value = (row) => {
      const cell = row.children[place];
      const number = parseFloat(cell.dataset.value);
      return cell.dataset.value === undefined ? cell.innerText.trim() : Number.isNaN(number) ? Infinity : number;
    };
    const compare = (one, other) =>
      typeof one === "number" ? (one < other ? -1 : one > other ? 1 : 0) : one.localeCompare(other);
    const body = head.closest("table").tBodies[0];
    const rows = [...body.rows].sort((one, other) => compare(value(one), value(other)));
    body.append(...(sorted.ascending ? rows : rows.reverse()));
  };

  document.addEventListener("click", (event) => {
    const head = event.target.closest("[data-sort]")?.closest("th");
    if (!head) return;
    sorted = { title: head.innerText, ascending: !(sorted?.title === head.innerText && sorted.ascending) };
    sortRows();
  });
  document.addEventListener("htmx:afterSettle", sortRows);

  document.addEventListener("DOMContentLoaded", () => document.getElementById("problems")?.focus());

  // Jobs that end while a page of theirs is open, also if it reloads itself: a note on the page, and one of the browser
  // if the user has asked for it.
  const ENDED = { succeeded: "is done", failed: "has failed", cancelled: "was cancelled" };
  const mayNotify = () => "Notification" in window && Notification.permission === "granted";

  const announce = (job, name, status) => {
    const link = document.createElement("a");
    link.href = `/ui/jobs/${job}`;
    link.textContent = `${name} ${ENDED[status]}`;
    const toast = document.createElement("p");
    toast.className = `toast ${status}`;
    toast.append(link);
    document.querySelector(".toasts").append(toast);
    setTimeout(() => toast.remove(), 15000);
    if (!mayNotify()) return;
    const note = new Notification("Rocket", { body: link.textContent, tag: job });
    note.onclick = () => (window.focus(), location.assign(link.href));
  };

  const watchJobs = () => {
    for (const { dataset } of document.querySelectorAll("[data-job]")) {
      const key = `status-${dataset.job}`;
      const before = sessionStorage.getItem(key);
      if (dataset.status in ENDED) sessionStorage.removeItem(key);
      else sessionStorage.setItem(key, dataset.status);
      if (before && dataset.status in ENDED) announce(dataset.job, dataset.name, dataset.status);
    }
    const canAsk = "Notification" in window && Notification.permission === "default";
    for (const button of document.querySelectorAll("[data-notify]")) button.hidden = !canAsk;
  };

  document.addEventListener("click", async (event) => {
    if (!event.target.closest("[data-notify]")) return;
    await Notification.requestPermission();
    watchJobs();
  });
  document.addEventListener("DOMContentLoaded", watchJobs);
  document.addEventListener("htmx:afterSettle", watchJobs);
})();
