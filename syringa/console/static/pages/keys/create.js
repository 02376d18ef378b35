/** The dialog that creates a key, and shows it once. */

import { post } from "../../api.js";
import * as format from "../../format.js";
import { useAction } from "../../hooks.js";
import { html, useState } from "../../lib.js";
import { me, signIn } from "../../state.js";
import { Button, CopyButton, Dialog, ErrorNotice, Field, Notice, NumberInput, Select, Switch, TextInput } from "../../ui/index.js";
import { useModels } from "../shared.js";

export const LIMITS = [
  { id: "requests_per_minute", label: "Requests per minute", unit: "requests/min" },
  { id: "tokens_per_minute", label: "Tokens per minute", unit: "tokens/min" },
  { id: "concurrent", label: "Concurrent requests", unit: "at a time" },
];
const EXPIRIES = [
  { value: "", label: "Never" }, { value: "1", label: "In a day" }, { value: "7", label: "In 7 days" },
  { value: "30", label: "In 30 days" }, { value: "90", label: "In 90 days" }, { value: "365", label: "In a year" },
];

/** @param {{organizations: string[], onClose: () => void}} props */
export function CreateKey({ organizations, onClose }) {
  const [first] = useState(() => me.value?.details.keys_required === false);
  const [created, setCreated] = useState(/** @type {any} */ (null));
  /** @param {any} key */
  const show = async (key) => {
    setCreated(key);
    // From now on the console needs a key, too. One without rights would take this page away, so it waits until it was copied.
    if (first && key.admin) await signIn(key.key);
  };
  return created ? html`<${NewKey} created=${created} first=${first} onClose=${onClose} />` : html`<${KeyForm} organizations=${organizations} first=${first} onCreated=${show} onClose=${onClose} />`;
}

/** @param {{organizations: string[], first: boolean, onCreated: (key: any) => Promise<void>, onClose: () => void}} props */
function KeyForm({ organizations, first, onCreated, onClose }) {
  const [organization, setOrganization] = useState(me.value?.organization ?? organizations[0] ?? "");
  const [name, setName] = useState("");
  const [admin, setAdmin] = useState(first);
  const [days, setDays] = useState("");
  const [chosen, setChosen] = useState(/** @type {string[]} */ ([]));
  const [limits, setLimits] = useState(/** @type {Record<string, number | undefined>} */ ({}));
  const models = useModels();
  const create = useAction(async () => {
    await onCreated(
      await post("/admin/keys", {
        organization: organization.trim(),
        name: name.trim(),
        admin,
        models: chosen.length > 0 ? chosen : null,
        expires_at: days ? Math.floor(Date.now() / 1000) + Number(days) * 86400 : null,
        ...limits,
      }),
    );
  });
  /** @param {string} id @param {boolean} on */
  const choose = (id, on) => setChosen(on ? [...chosen, id] : chosen.filter((each) => each !== id));
  // A key that is created while nothing shows it could never be read.
  const close = () => create.busy || onClose();
  return html`<${Dialog} open form title="Create a key" onClose=${close}
    actions=${html`<${Button} onClick=${close}>Cancel<//><${Button} variant="primary" type="submit" form="create-key" busy=${create.busy} disabled=${!organization.trim()}>Create<//>`}>
    <form id="create-key" class="stack" onSubmit=${(event) => { event.preventDefault(); void create.run(); }}>
      <${ErrorNotice} error=${create.error} />
      <${TextInput} label="Organization" required value=${organization} onInput=${setOrganization} list="organizations" hint="Stored responses, usage and limits belong to it. A new name creates it." />
      <datalist id="organizations">${organizations.map((each) => html`<option key=${each} value=${each}></option>`)}</datalist>
      <${TextInput} label="Name" value=${name} onInput=${setName} maxlength="100" placeholder="website" hint="What the key is for." />
      <${Switch} label="Administrator" checked=${admin} onChange=${setAdmin} hint=${first && !admin ? "Without an administrator's key, keys and models can only be changed on the server's command line." : "May change keys, models and limits, and see all usage."} />
      <${Select} label="Expires" value=${days} onChange=${setDays} options=${EXPIRIES} />
      <details><summary>Models and limits</summary>
        <div class="stack">
          ${(models.data?.length ?? 0) > 0 && html`<fieldset><legend>Models</legend>
            ${models.data?.map((each) => html`<${Switch} key=${each.id} label=${each.id} checked=${chosen.includes(each.id)} onChange=${(on) => choose(each.id, on)} />`)}
            <p class="muted small">None chosen: all models.</p></fieldset>`}
          ${LIMITS.map(({ id, label }) => html`<${NumberInput} key=${id} label=${label} min=${0} step=${1} placeholder="no limit of its own" value=${limits[id]} onChange=${(/** @type {number | undefined} */ value) => setLimits({ ...limits, [id]: value })} />`)}
        </div>
      </details>
    </form>
  <//>`;
}

/** @param {{created: any, first: boolean, onClose: () => void}} props */
function NewKey({ created, first, onClose }) {
  const done = async () => {
    if (first && !created.admin) await signIn(created.key);
    onClose();
  };
  return html`<${Dialog} open title="Copy the key now" actions=${html`<${Button} variant="primary" onClick=${done}>${first && !created.admin ? "Sign in with it" : "Done"}<//>`}>
    <${Notice} tone="warning">It is shown only once: the server stores its hash.<//>
    <${Field} label=${`Key of ${created.organization}${created.name ? `, ${created.name}` : ""}`}>
      ${(attributes) => html`<div class="row"><input class="input mono" readonly ...${attributes} value=${created.key} onFocus=${(event) => event.target.select()} /><${CopyButton} text=${created.key} label="Copy" withText /></div>`}
    <//>
    ${first && html`<p>From now on every request needs a key. This console uses the new one${created.admin ? "" : ", which may not change keys"}.</p>`}
    ${created.expires_at && html`<p class="muted">It expires on ${format.date(created.expires_at)}.</p>`}
  <//>`;
}
