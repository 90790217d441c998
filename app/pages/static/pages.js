// What templates and htmx do not do: two controls for one number, and answers that are no success shown where they belong.
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

  document.addEventListener("DOMContentLoaded", () => document.getElementById("problems")?.focus());
})();
