"use strict";
// Renders the OpenAPI document as a readable page, without anything from elsewhere.

const make = (parent, name, text = null, kind = null) => {
  const made = document.createElement(name);
  if (text !== null) made.textContent = text;
  if (kind) made.className = kind;
  parent.append(made);
  return made;
};

function resolve(schema, all, depth = 0) {
  if (!schema || depth > 12) return schema;
  if (schema.$ref) return resolve(all[schema.$ref.split("/").pop()], all, depth + 1);
  if (Array.isArray(schema)) return schema.map((item) => resolve(item, all, depth + 1));
  if (typeof schema !== "object") return schema;
  return Object.fromEntries(Object.entries(schema).map(([key, value]) => [key, resolve(value, all, depth + 1)]));
}

function kind(schema) {
  if (!schema) return "";
  if (schema.anyOf) return schema.anyOf.map(kind).filter((name) => name !== "null").join(" or ");
  if (schema.type === "array") return `list of ${kind(schema.items)}`;
  return schema.format ? `${schema.type} (${schema.format})` : schema.title && schema.properties ? schema.title : schema.type ?? "any";
}

function fields(parent, schema) {
  if (schema?.type === "array") return fields(parent, schema.items);
  if (schema?.anyOf) return schema.anyOf.forEach((one) => fields(parent, one));
  if (!schema?.properties) return;
  const table = make(parent, "table");
  for (const [name, one] of Object.entries(schema.properties)) {
    const row = make(table, "tr");
    make(make(row, "td"), "code", name);
    make(row, "td", kind(one));
    make(row, "td", one.description ?? "");
  }
  Object.values(schema.properties).forEach((one) => fields(parent, one));
}

function operation(main, path, method, op, all) {
  const box = make(main, "details", null, "op");
  const summary = make(box, "summary");
  make(summary, "span", method.toUpperCase(), "method");
  make(summary, "code", path);
  summary.append(` ${op.description ?? op.summary ?? ""}`);
  if (op.parameters?.length) {
    make(box, "h3", "Parameters");
    const table = make(box, "table");
    for (const one of op.parameters) {
      const row = make(table, "tr");
      make(make(row, "td"), "code", one.name);
      make(row, "td", `${one.in}, ${kind(one.schema)}${one.schema.default !== undefined ? `, default ${one.schema.default}` : ""}`);
      make(row, "td", one.description ?? "");
    }
  }
  if (op.requestBody) {
    make(box, "h3", "Body, one of");
    const table = make(box, "table");
    for (const [type, one] of Object.entries(op.requestBody.content)) {
      const row = make(table, "tr");
      make(make(row, "td"), "code", type);
      make(row, "td", kind(one.schema));
    }
  }
  make(box, "h3", "Answers");
  const table = make(box, "table");
  for (const [status, one] of Object.entries(op.responses)) {
    const row = make(table, "tr");
    make(row, "td", status);
    make(row, "td", one.description);
  }
  const good = op.responses["200"]?.content?.["application/json"]?.schema;
  fields(box, resolve(good, all));
}

async function draw() {
  const main = document.getElementById("operations");
  try {
    const found = await (await fetch("openapi.json")).json();
    main.replaceChildren();
    document.getElementById("what").textContent = `${found.info.summary} (version ${found.info.version})`;
    const all = found.components?.schemas ?? {};
    const list = make(main, "section");
    for (const [path, methods] of Object.entries(found.paths)) {
      for (const [method, op] of Object.entries(methods)) operation(list, path, method, op, all);
    }
    list.querySelector("details").open = true;
  } catch {
    main.textContent = "The API document could not be loaded.";
  }
}

draw();
