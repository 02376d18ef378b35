import js from "@eslint/js";
import globals from "globals";

export default [
  { ignores: ["syringa/console/static/vendor/**"] },
  js.configs.recommended,
  {
    files: ["syringa/console/static/**/*.js"],
    languageOptions: { ecmaVersion: 2024, sourceType: "module", globals: globals.browser },
    rules: {
      eqeqeq: "error",
      "no-eval": "error",
      "no-implied-eval": "error",
      "no-new-func": "error",
      "no-var": "error",
      "prefer-const": "error",
      "no-unused-expressions": "off",
      "no-unused-vars": ["error", { argsIgnorePattern: "^_" }],
      // The client is the only module that talks to the server, and Markdown the only one that makes HTML of text.
      "no-restricted-globals": ["error", "fetch", "XMLHttpRequest", "EventSource", "WebSocket"],
      "no-restricted-properties": [
        "error",
        { property: "innerHTML", message: "Render text, or use ui/markdown.js." },
        { property: "outerHTML", message: "Render text, or use ui/markdown.js." },
        { property: "dangerouslySetInnerHTML", message: "Render text, or use ui/markdown.js." },
      ],
    },
  },
  { files: ["syringa/console/static/api.js"], rules: { "no-restricted-globals": "off" } },
  { files: ["syringa/console/static/theme.js"], languageOptions: { sourceType: "script" } },
];
