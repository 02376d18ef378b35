import { lazy } from "../../ui/index.js";

/** @type {import("../index.js").PageEntry} */
export default {
  path: "/completions",
  title: "Completions",
  icon: "completions",
  group: "Playground",
  scope: null,
  css: [new URL("./completions.css", import.meta.url).href],
  component: lazy(() => import("./page.js")),
};
