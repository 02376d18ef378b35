import { lazy } from "../../ui/index.js";

/** @type {import("../index.js").PageEntry} */
export default {
  path: "/chat",
  title: "Chat",
  icon: "chat",
  group: "Playground",
  scope: null,
  css: [new URL("./chat.css", import.meta.url).href],
  component: lazy(() => import("./page.js")),
};
