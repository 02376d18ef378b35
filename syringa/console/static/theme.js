// Runs before the first paint, so that a chosen theme does not flash. Everything else about themes is in state.js.
(() => {
  let theme = "system";
  try {
    theme = localStorage.getItem("syringa.theme") || "system";
  } catch {
    // Storage is blocked: the system's theme.
  }
  document.documentElement.dataset.theme = theme;
})();
