// Before the first paint, so that a page that was set to dark does not flash white.
try {
  var chosen = localStorage.getItem("penstock.scheme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.scheme = chosen;
} catch (e) {
  // Storage is switched off: the system's scheme it is.
}
