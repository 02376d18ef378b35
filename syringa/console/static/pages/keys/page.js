/** Keys and organizations: create, limit and revoke. */

import { del, put } from "../../api.js";
import * as format from "../../format.js";
import { useAction, useResource } from "../../hooks.js";
import { html, useState } from "../../lib.js";
import { me } from "../../state.js";
import { Badge, Button, Card, Dialog, EmptyState, ErrorNotice, Loaded, Notice, NumberInput, Page, Select, Switch, Table, Tabs, TextInput, confirm } from "../../ui/index.js";
import { act, list } from "../shared.js";
import { CreateKey, LIMITS } from "./create.js";

const LIST_MS = 10000;

/** @typedef {import("../../hooks.js").Resource<any[]>} List */

export default function KeysPage() {
  const [tab, setTab] = useState("keys");
  const [creating, setCreating] = useState(false);
  const [revoked, setRevoked] = useState(false);
  // With the first key, lists are refused without it, and a refusal would take its dialog away.
  const often = { interval: creating ? 0 : LIST_MS };
  const keys = useResource((signal) => list("/admin/keys", { revoked: revoked || null }, signal), [revoked], often);
  const organizations = useResource((signal) => list("/admin/organizations", {}, signal), [], often);
  const create = html`<${Button} variant="primary" icon="plus" onClick=${() => setCreating(true)}>Create key<//>`;
  const close = () => {
    setCreating(false);
    keys.reload();
    organizations.reload();
  };
  return html`<${Page} title="Keys" lead="Who may use this server, and how much." actions=${create}>
    ${me.value?.details.keys_required === false && html`<${Notice} title="This server has no keys">Any client that can reach it may use it. With the first key, every request needs one, also of this console.<//>`}
    <${Tabs} label="Keys and organizations" tabs=${[{ id: "keys", label: "Keys" }, { id: "organizations", label: "Organizations" }]} value=${tab} onChange=${setTab}>
      ${(id) =>
        id === "keys" ? html`<${Keys} keys=${keys} create=${create} revoked=${revoked} setRevoked=${setRevoked} />` : html`<${Organizations} organizations=${organizations} keys=${keys.data ?? []} />`}
    <//>
    ${creating && html`<${CreateKey} organizations=${(organizations.data ?? []).map((each) => each.id)} onClose=${close} />`}
  <//>`;
}

/** @param {{keys: List, create: any, revoked: boolean, setRevoked: (value: boolean) => void}} props */
function Keys({ keys, create, revoked, setRevoked }) {
  const [organization, setOrganization] = useState("");
  /** @param {any} key */
  const revoke = async (key) => {
    const own = key.id === me.value?.details.key?.id;
    const text = `Within a second it is refused, and what it has started ends.${own ? " You are signed in with this key." : ""}`;
    if (!(await confirm({ title: `Revoke ${key.name || key.hint}?`, text, action: "Revoke" }))) return;
    await act(() => del(`/admin/keys/${key.id}`), "The key was revoked");
    keys.reload();
  };
  /** @type {import("../shared.js").Column[]} */
  const columns = [
    { key: "name", label: "Key", sort: (row) => row.name, render: (row) => html`<strong>${row.name || "Unnamed"}</strong><div class="muted mono small nowrap">${row.hint}…</div>` },
    { key: "organization", label: "Organization", sort: (row) => row.organization, render: (row) => html`<span class="nowrap">${row.organization}</span>` },
    { key: "rights", label: "Rights", render: (row) => html`<div class="row wrap">${row.admin && html`<${Badge} tone="accent">admin<//>`}<span>${row.models ? row.models.join(", ") : "all models"}</span></div>` },
    { key: "limits", label: "Limits", render: (row) => LIMITS.filter(({ id }) => row[id]).map(({ id, unit }) => html`<div key=${id} class="nowrap">${format.short(row[id])} ${unit}</div>`) },
    { key: "last_used_at", label: "Last used", sort: (row) => row.last_used_at, render: (row) => (row.last_used_at ? format.ago(row.last_used_at) : "never") },
    { key: "created_at", label: "Created", sort: (row) => row.created_at, render: (row) => html`<span class="nowrap">${format.date(row.created_at)}</span>` },
    { key: "expires_at", label: "Expires", sort: (row) => row.expires_at, render: (row) => html`<span class="nowrap">${row.expires_at ? format.date(row.expires_at) : "never"}</span>` },
    {
      key: "revoke",
      label: html`<span class="visually-hidden">Action</span>`,
      render: (row) => (row.revoked_at ? html`<${Badge} tone="bad">revoked<//>` : html`<${Button} size="small" variant="danger" aria-label=${`Revoke ${row.name || row.hint}`} onClick=${() => revoke(row)}>Revoke<//>`),
    },
  ];
  return html`<${Loaded} of=${keys} label="Loading keys">
    ${(/** @type {any[]} */ all) => {
      const names = [...new Set(all.map((each) => each.organization))].sort();
      const rows = organization ? all.filter((each) => each.organization === organization) : all;
      if (all.length === 0 && !revoked) return html`<${Card}><${EmptyState} icon="keys" title="No keys yet" action=${create}>Create one for each program or person, so that it can be limited and revoked alone.<//><//>`;
      return html`<div class="stack">
        <div class="row wrap">
          <${Select} label="Organization" hideLabel value=${organization} onChange=${setOrganization} options=${[{ value: "", label: "All organizations" }, ...names]} />
          <${Switch} label="Show revoked keys" checked=${revoked} onChange=${setRevoked} />
        </div>
        <${Card} class="flush"><${Table} caption="Keys" columns=${columns} rows=${rows} initialSort=${{ key: "created_at", descending: true }} /><//>
      </div>`;
    }}
  <//>`;
}

/** @param {{organizations: List, keys: any[]}} props */
function Organizations({ organizations, keys }) {
  const [edited, setEdited] = useState(/** @type {any} */ (null));
  /** @type {import("../shared.js").Column[]} */
  const columns = [
    { key: "id", label: "Organization", sort: (row) => row.id, render: (row) => html`<strong>${row.id}</strong>` },
    ...LIMITS.map(({ id, label }) => ({ key: id, label, numeric: true, render: (/** @type {any} */ row) => limit(row[id]) })),
    { key: "keys", label: "Keys", numeric: true, render: (row) => keys.filter((key) => key.organization === row.id && !key.revoked_at).length },
    { key: "created_at", label: "Created", sort: (row) => row.created_at, render: (row) => format.date(row.created_at) },
    { key: "edit", label: html`<span class="visually-hidden">Action</span>`, render: (row) => html`<${Button} size="small" icon="edit" aria-label=${`Limits of ${row.id}`} onClick=${() => setEdited(row)}>Limits<//>` },
  ];
  return html`<div class="stack">
    <div><${Button} icon="plus" onClick=${() => setEdited({})}>Add organization<//></div>
    <${Loaded} of=${organizations}>
      ${(rows) => html`<${Card} class="flush"><${Table} caption="Organizations" columns=${columns} rows=${rows}
        empty=${html`<${EmptyState} icon="keys" title="No organizations yet">An organization is created with its first key, or here, to set its limits before.<//>`} /><//>`}
    <//>
    ${edited && html`<${EditLimits} organization=${edited} onClose=${() => setEdited(null)} onDone=${organizations.reload} />`}
  </div>`;
}

/** @param {number | null} value */
function limit(value) {
  return value === null ? html`<span class="muted">default</span>` : value === 0 ? "none" : format.number(value);
}

/** @param {{organization: any, onClose: () => void, onDone: () => void}} props */
function EditLimits({ organization, onClose, onDone }) {
  const [name, setName] = useState("");
  const [values, setValues] = useState(/** @type {Record<string, number | undefined>} */ (Object.fromEntries(LIMITS.map(({ id }) => [id, organization[id] ?? undefined]))));
  const save = useAction(async () => {
    const body = Object.fromEntries(LIMITS.map(({ id }) => [id, values[id] ?? "default"]));
    await put(`/admin/organizations/${encodeURIComponent(organization.id ?? name.trim())}`, body);
    onDone();
    onClose();
  });
  return html`<${Dialog} open form title=${organization.id ? `Limits of ${organization.id}` : "Add an organization"} onClose=${onClose}
    actions=${html`<${Button} onClick=${onClose}>Cancel<//><${Button} variant="primary" busy=${save.busy} disabled=${!organization.id && !name.trim()} onClick=${() => save.run()}>Save<//>`}>
    <${ErrorNotice} error=${save.error} />
    ${!organization.id && html`<${TextInput} label="Name" value=${name} onInput=${setName} hint="Letters, digits, dots, hyphens and underscores." />`}
    ${LIMITS.map(({ id, label }) => html`<${NumberInput} key=${id} label=${label} min=${0} step=${1} placeholder="the server's setting" value=${values[id]} onChange=${(/** @type {number | undefined} */ value) => setValues({ ...values, [id]: value })} />`)}
    <p class="muted small">Empty: the server's setting. 0: no limit.</p>
  <//>`;
}
