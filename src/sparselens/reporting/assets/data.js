// The rows this page carries, and the typed arrays inside them.

export const report = JSON.parse(document.getElementById("rows").textContent);

const TYPES = { Uint8Array, Uint16Array, Int16Array };
const decoded = new WeakMap();

/** {type, scale, data} -> {values, scale}: base64, deflated. Once per array. */
export function decode(packed) {
  if (!decoded.has(packed)) decoded.set(packed, unpack(packed));
  return decoded.get(packed);
}

async function unpack({ type, scale, data }) {
  const text = atob(data);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return { values: new TYPES[type](await new Response(stream).arrayBuffer()), scale };
}

export const ROLE_NAMES = { dense: "Dense", base: "Base", control: "Control", sparse: "Sparse" };
