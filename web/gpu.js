"use strict";
// Matrix products by WebGPU, where there is one: the same numbers as product.js, of the weights that Memory.pack packed.

const SIDE = 8;                          // of a group of threads: so many wide and high

// out (T, O) = x (T, I) w^T, w packed: (O/8, I, 8). The arrays are read four floats at a time, which lie side by side
// along I in x and along O in w and out. A thread makes a tile of four rows and four columns of out; beyond the last row
// of x it reads zeros or other numbers, and writes nothing.
const SHADER = `
@group(0) @binding(0) var<storage, read> size: array<u32, 3>;            // T, I, O
@group(0) @binding(1) var<storage, read> x: array<vec4f>;
@group(0) @binding(2) var<storage, read> w: array<vec4f>;
@group(0) @binding(3) var<storage, read_write> out: array<vec4f>;

@compute @workgroup_size(${SIDE}, ${SIDE})
fn product(@builtin(global_invocation_id) thread: vec3u) {
  let T = size[0]; let I = size[1]; let O = size[2]; let o = 4 * thread.x; let t = 4 * thread.y;
  if (o >= O || t >= T) { return; }
  let own = o / 8 * I * 2 + o % 8 / 4;
  var a = vec4f(); var b = vec4f(); var c = vec4f(); var d = vec4f();
  for (var i = 0u; i < I; i += 4) {
    let n = own + 2 * i; let four = mat4x4f(w[n], w[n + 2], w[n + 4], w[n + 6]);
    let at = (t * I + i) / 4;
    a += four * x[at]; b += four * x[at + I / 4]; c += four * x[at + I / 2]; d += four * x[at + I / 4 * 3];
  }
  let at = (t * O + o) / 4; var rows = array(a, b, c, d);
  for (var r = 0u; r < min(4, T - t); r++) { out[at + r * O / 4] = rows[r]; }
}`;

class Gpu {
  // What there is, ready for products; null if there is none, or if it cannot do them.
  static async find() {
    try {
      const adapter = await navigator.gpu?.requestAdapter(), device = await adapter?.requestDevice();
      if (!device) return null;
      const module = device.createShaderModule({ code: SHADER });
      return new Gpu(device, await device.createComputePipelineAsync({ layout: "auto", compute: { module, entryPoint: "product" } }));
    } catch {
      return null;
    }
  }

  constructor(device, pipeline) {
    Object.assign(this, { device, pipeline, weights: new Map() });       // of packed weights, the buffer that has them
  }

  // A buffer of this data.
  filled(data) {
    const buffer = this.device.createBuffer({ size: data.byteLength, usage: GPUBufferUsage.STORAGE, mappedAtCreation: true });
    new data.constructor(buffer.getMappedRange()).set(data);
    buffer.unmap();
    return buffer;
  }

  // As Memory.product, but out is written later. x is read at once. Throws if the device is lost or says an error.
  async product(x, w, out, T, I, O) {
    const { device, pipeline, weights } = this, size = 4 * T * O;
    device.pushErrorScope("validation");
    if (!weights.has(w)) weights.set(w, this.filled(w));
    const made = device.createBuffer({ size, usage: GPUBufferUsage.STORAGE | GPUBufferUsage.COPY_SRC });
    const read = device.createBuffer({ size, usage: GPUBufferUsage.COPY_DST | GPUBufferUsage.MAP_READ });
    const given = [this.filled(Uint32Array.of(T, I, O)), this.filled(x.subarray(0, T * I))];
    const commands = device.createCommandEncoder(), pass = commands.beginComputePass();
    pass.setPipeline(pipeline);
    pass.setBindGroup(0, device.createBindGroup({ layout: pipeline.getBindGroupLayout(0), entries:
      [...given, weights.get(w), made].map((buffer, binding) => ({ binding, resource: { buffer } })) }));
    pass.dispatchWorkgroups(Math.ceil(O / (4 * SIDE)), Math.ceil(T / (4 * SIDE)));
    pass.end();
    commands.copyBufferToBuffer(made, 0, read, 0, size);
    device.queue.submit([commands.finish()]);
    const [error] = await Promise.all([device.popErrorScope(), read.mapAsync(GPUMapMode.READ)]);
    if (error) throw error;
    out.set(new Float32Array(read.getMappedRange()));
    for (const buffer of [...given, made, read]) buffer.destroy();
  }
}
