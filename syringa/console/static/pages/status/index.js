import { lazy } from "../../ui/index.js";

/** @type {import("../index.js").PageEntry} */
export default {
  path: "/status",
  title: "Status",
  icon: "status",
  group: "Operate",
  scope: null,
  css: [new URL("./status.css", import.meta.url).href],
  component: lazy(() => import("./page.js")),
};
