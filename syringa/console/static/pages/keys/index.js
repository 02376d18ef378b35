import { lazy } from "../../ui/index.js";

/** @type {import("../index.js").PageEntry} */
export default {
  path: "/keys",
  title: "Keys",
  icon: "keys",
  group: "Account",
  scope: "admin",
  component: lazy(() => import("./page.js")),
};
