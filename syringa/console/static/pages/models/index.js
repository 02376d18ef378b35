import { lazy } from "../../ui/index.js";

/** @type {import("../index.js").PageEntry} */
export default {
  path: "/models",
  title: "Models",
  icon: "models",
  group: "Operate",
  scope: null,
  css: [new URL("./models.css", import.meta.url).href],
  component: lazy(() => import("./page.js")),
};
