// @grpc/grpc-js over every method of the service, and fetch over REST: prints what was left out as JSON.
//
//     node verbs.mjs HTTP GRPC
import assert from 'node:assert/strict';
import { fileURLToPath } from 'node:url';
import grpc from '@grpc/grpc-js';
import loader from '@grpc/proto-loader';

const [http, address] = process.argv.slice(2);
const folder = fileURLToPath(new URL('../../../proto', import.meta.url));
const A = Array.from({ length: 16 }, (_, i) => i);
const B = A.map(() => 1);
const sums = A.map((a) => a + 1);
const differences = A.map((a) => a - 1);

async function overGrpc() {
  const definition = loader.loadSync('grpc_service.proto', { includeDirs: [folder], keepCase: true, longs: Number });
  const { inference } = grpc.loadPackageDefinition(definition);
  const client = new inference.GRPCInferenceService(address, grpc.credentials.createInsecure());
  const called = new Set();
  const call = (name, request = {}) => {
    called.add(name);
    return new Promise((done, failed) => {
      const deadline = new Date(Date.now() + 60_000);
      client[name](request, { deadline }, (error, answer) => (error ? failed(error) : done(answer)));
    });
  };
  const refused = async (code, name, request) =>
    assert.rejects(call(name, request), (error) => error.code === code);
  const raw = (values) => Buffer.from(new Int32Array(values).buffer);
  const request = {
    model_name: 'simple',
    id: 'mine',
    inputs: ['INPUT0', 'INPUT1'].map((name) => ({ name, datatype: 'INT32', shape: [1, 16] })),
    raw_input_contents: [raw(A), raw(B)],
  };
  const check = (answer) => {
    assert.equal(answer.id, 'mine');
    const made = answer.raw_output_contents.map((b) => [...new Int32Array(new Uint8Array(b).buffer)]);
    assert.deepEqual(made, [sums, differences]);
  };

  assert((await call('ServerLive')).live && (await call('ServerReady')).ready);
  assert((await call('ModelReady', { name: 'simple' })).ready);
  assert((await call('ServerMetadata')).extensions.includes('statistics'));
  assert.equal((await call('ModelMetadata', { name: 'simple' })).platform, 'kernel');
  assert.equal((await call('ModelConfig', { name: 'simple' })).config.max_batch_size, 8);
  check(await call('ModelInfer', request));
  const typed = { ...request, raw_input_contents: [] };
  typed.inputs = request.inputs.map((one, i) => ({ ...one, contents: { int_contents: [A, B][i] } }));
  check(await call('ModelInfer', typed));
  await refused(grpc.status.NOT_FOUND, 'ModelInfer', { ...request, model_name: 'nothing' });

  called.add('ModelStreamInfer');
  const stream = client.ModelStreamInfer();
  for (let i = 0; i < 3; i += 1) stream.write(request);
  stream.end();
  let answers = 0;
  for await (const answer of stream) {
    check(answer.infer_response);
    answers += 1;
  }
  assert.equal(answers, 3);

  assert.equal((await call('ModelStatistics', { name: 'simple' })).model_stats.length, 1);
  assert((await call('RepositoryIndex')).models.some((model) => model.name === 'simple'));
  await call('RepositoryModelLoad', { model_name: 'identity_int16' });
  assert((await call('ModelReady', { name: 'identity_int16' })).ready);
  await call('RepositoryModelUnload', { model_name: 'identity_int16' });
  await call('SystemSharedMemoryStatus');
  await refused(grpc.status.INTERNAL, 'SystemSharedMemoryRegister', { name: 'r', key: '/neptrio-none', byte_size: 8 });
  await call('SystemSharedMemoryUnregister', { name: 'r' });
  await call('CudaSharedMemoryStatus');
  await refused(grpc.status.INVALID_ARGUMENT, 'CudaSharedMemoryRegister', { name: 'r', byte_size: 8 });
  await call('CudaSharedMemoryUnregister', { name: 'r' });
  assert('trace_rate' in (await call('TraceSetting')).settings);
  assert('log_info' in (await call('LogSettings')).settings);
  client.close();
  return Object.keys(inference.GRPCInferenceService.service).filter((name) => !called.has(name));
}

async function overFetch() {
  const base = `http://${http}`;
  const post = (path, body, headers = {}) =>
    fetch(base + path, { method: 'POST', headers, body: typeof body === 'string' || body instanceof Uint8Array ? body : JSON.stringify(body) });
  const document = await (await fetch(`${base}/openapi.json`)).json();
  const inputs = [['INPUT0', A], ['INPUT1', B]].map(([name, data]) => ({ name, datatype: 'INT32', shape: [1, 16], data }));

  let answer = await post('/v2/models/simple/infer', { inputs });
  assert.equal(answer.status, 200);
  assert.deepEqual((await answer.json()).outputs.map((output) => output.data), [sums, differences]);

  // binary tensors both ways
  const head = new TextEncoder().encode(JSON.stringify({
    parameters: { binary_data_output: true },
    inputs: inputs.map(({ data, ...rest }) => ({ ...rest, parameters: { binary_data_size: 64 } })),
  }));
  const body = new Uint8Array(head.length + 128);
  body.set(head);
  body.set(new Uint8Array(new Int32Array([...A, ...B]).buffer), head.length);
  answer = await post('/v2/models/simple/infer', body, { 'Inference-Header-Content-Length': String(head.length) });
  const bytes = new Uint8Array(await answer.arrayBuffer());
  const length = Number(answer.headers.get('inference-header-content-length'));
  assert.deepEqual([...new Int32Array(bytes.slice(length).buffer)], [...sums, ...differences]);

  // streams, read as they come
  for (const [path, given] of [['infer_stream', { inputs }], ['generate_stream', { INPUT0: A, INPUT1: B }]]) {
    answer = await post(`/v2/models/simple/${path}`, given);
    assert.match(answer.headers.get('content-type'), /^text\/event-stream/);
    let text = '';
    for await (const part of answer.body.pipeThrough(new TextDecoderStream())) text += part;
    const made = JSON.parse(text.match(/^data: (.*)\n\n/)[1]);
    assert.deepEqual(made.OUTPUT0 ?? made.outputs[0].data, sums);
  }
  assert.deepEqual((await (await post('/v2/models/simple/generate', { INPUT0: A, INPUT1: B })).json()).OUTPUT1, differences);

  // a request that is given up
  const control = new AbortController();
  const slow = fetch(`${base}/v2/models/simple/infer`, { method: 'POST', body: JSON.stringify({ inputs }), signal: control.signal });
  control.abort();
  await assert.rejects(slow, { name: 'AbortError' });

  // everything that can be read, by the server's own description
  const names = { model: 'simple', version: '1', region: 'none' };
  for (const [path, item] of Object.entries(document.paths)) {
    if (!item.get) continue;
    const url = path.replace(/\{(\w+)\}/g, (_, name) => names[name]);
    answer = await fetch(base + url);
    assert(String(answer.status) in item.get.responses, `${url}: ${answer.status}`);
    if (answer.headers.get('content-type') === 'application/json') await answer.json();
    else await answer.text();
  }
  assert.equal((await post('/v2/repository/models/identity_uint8/load', '')).status, 200);
  assert.equal((await fetch(`${base}/v2/models/identity_uint8/ready`)).status, 200);
  assert.equal((await post('/v2/repository/models/identity_uint8/unload', '')).status, 200);
  assert.equal((await (await post('/v2/logging', { log_verbose_level: 0 })).json()).log_verbose_level, 0);
  return [];
}

console.log(JSON.stringify({ grpc: await overGrpc(), rest: await overFetch() }));
