import { lazy } from "../../ui/index.js";

/** @type {import("../index.js").PageEntry} */
export default {
  path: "/usage",
  title: "Usage",
  icon: "usage",
  group: "Account",
  scope: null,
  component: lazy(() => import("./page.js")),
};
