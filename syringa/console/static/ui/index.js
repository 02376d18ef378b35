/** All components, under one import. Charts and Markdown are apart, because of the libraries that they bring. */

export { Button, CopyButton, IconButton } from "./button.js";
export { Confirmations, Dialog, Menu, confirm } from "./dialog.js";
export { Badge, EmptyState, ErrorNotice, ErrorText, Loaded, Notice, Progress, Spinner, Toasts, toast, toastError } from "./feedback.js";
export { Field, GrowingTextArea, JsonInput, NumberInput, Select, Switch, TextArea, TextInput, parseJson } from "./form.js";
export { Icon } from "./icons.js";
export { Card, CodeBlock, Page, Stat, Stats, Tabs } from "./layout.js";
export { Table } from "./table.js";
