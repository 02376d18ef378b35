import { lazy } from "../../ui/index.js";

/** @type {import("../index.js").PageEntry} */
export default {
  path: "/embeddings",
  title: "Embeddings",
  icon: "embeddings",
  group: "Playground",
  scope: null,
  css: [new URL("./embeddings.css", import.meta.url).href],
  component: lazy(() => import("./page.js")),
};
