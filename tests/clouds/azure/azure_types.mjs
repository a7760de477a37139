// Makes azure_types.json: what Azure's bodies may contain, by the mappers of its JavaScript SDK. AutoRest made those of the
// OpenAPI description; the Python SDK that we run was made of TypeSpec, by another generator. So the two are independent.
//
//   npm install @azure/arm-compute@23.3.0 @azure/arm-network@36.0.0 @azure/arm-resources@7.0.0
//   node azure_types.mjs node_modules > azure_types.json
//
// A type is {path in the body: kind}. Kinds: String Number Boolean Date any, Enum(a|b), [of], {of}, #type; with a "!" where
// the field is required, a "~" where only Azure writes it. Types that only answers contain are left out.
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";
import { resolve } from "node:path";

const require = createRequire(import.meta.url);
const modules = resolve(process.argv[2]);
const roots = {
  "arm-compute": ["VirtualMachine", "SshPublicKeyResource", "Disk"],
  "arm-network": ["NetworkSecurityGroup", "VirtualNetwork", "NetworkInterface", "PublicIPAddress"],
  "arm-resources": ["ResourceGroup"],
};

function kindOf(type, found) {
  if (type.name === "Sequence") return `[${kindOf(type.element.type, found)}]`;
  if (type.name === "Dictionary") return `{${kindOf(type.value.type, found)}}`;
  if (type.name === "Enum") return `Enum(${type.allowedValues.join("|")})`;
  if (type.name === "DateTime") return "Date";
  if (type.name !== "Composite") return type.name;
  found.push(type.className);
  return `#${type.className}`;
}

const sources = [];
const types = {};
for (const [name, wanted] of Object.entries(roots)) {
  const folder = `${modules}/@azure/${name}`;
  const { version, license } = JSON.parse(readFileSync(`${folder}/package.json`));
  sources.push({ package: `@azure/${name}`, version, license });
  const mappers = require(`${folder}/dist/commonjs/models/mappers.js`);
  const queue = [...wanted];
  while (queue.length) {
    const type = queue.pop();
    if (types[type]) continue;
    const fields = (types[type] = {});
    for (const field of Object.values(mappers[type].type.modelProperties ?? {})) {
      const kind = field.readOnly ? "any~" : kindOf(field.type, queue) + (field.required ? "!" : "");
      fields[field.serializedName] = kind;
    }
  }
}
const lines = Object.keys(types).sort().map((type) => ` ${JSON.stringify(type)}: ${JSON.stringify(types[type])}`);
console.log(`{"sources": ${JSON.stringify(sources)},\n"types": {\n${lines.join(",\n")}\n}}`);
