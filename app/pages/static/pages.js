// What templates and htmx do not do: two controls for one number, and answers that are no success shown where they belong.
(() => {
  "use strict";

  document.addEventListener("input", (event) => {
    const other = event.target.dataset.mirrors;
    if (other) document.getElementById(other).value = event.target.value;
    const chosen = document.getElementById(`target-${event.target.id.replace(/-slider$/, "")}`);
    if (chosen) chosen.checked = true;
  });

  document.addEventListener("DOMContentLoaded", () => document.getElementById("problems")?.focus());
})();
