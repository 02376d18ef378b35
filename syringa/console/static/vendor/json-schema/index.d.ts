export * from "@cfworker/json-schema";
