import { lazy } from "../../ui/index.js";

/** @type {import("../index.js").PageEntry} */
export default {
  path: "/responses",
  title: "Responses",
  icon: "responses",
  group: "Playground",
  scope: null,
  css: [new URL("./responses.css", import.meta.url).href],
  component: lazy(() => import("./page.js")),
};
