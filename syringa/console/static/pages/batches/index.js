import { lazy } from "../../ui/index.js";

/** @type {import("../index.js").PageEntry} */
export default {
  path: "/batches",
  title: "Batches",
  icon: "batches",
  group: "Playground",
  scope: null,
  component: lazy(() => import("./page.js")),
};
