import { lazy } from "../../ui/index.js";

/** @type {import("../index.js").PageEntry} */
export default {
  path: "/fleet",
  title: "Fleet",
  icon: "fleet",
  group: "Operate",
  scope: "admin",
  css: [new URL("./fleet.css", import.meta.url).href],
  available: (details) => Boolean(details.server?.cluster),
  component: lazy(() => import("./page.js")),
};
