from .test_number_formats import *
def test_nan(make_tiny_expert, make_request, tmp_path):
    files, _ = save_pair(tmp_path, make_tiny_expert, LAYOUTS["mxfp8"])
    from safetensors.torch import save_file
    t=load_file(files["high"]); t["blocks.0.self_attn.q.weight_scale"].view(torch.uint8).view(-1)[0]=255; save_file(t,files["high"])
    with open_experts(*files.values(), compute_dtype=torch.float32) as pair:
        try:
            print("NAN", denoise(pair, make_request(), policy=LAYERWISE, device="cpu").latents.isnan().any())
        except Exception as e: print("NAN", type(e).__name__, e)
def test_fullprec(make_tiny_expert, make_request, tmp_path):
    import json
    from safetensors.torch import save_file
    files, _ = save_pair(tmp_path, make_tiny_expert, LAYOUTS["int8 rows"])
    for f in files.values():
        t=load_file(f)
        for k in list(t):
            if k.endswith("comfy_quant"): t[k]=torch.tensor(list(json.dumps({"format":"int8_tensorwise","full_precision_matrix_mult":True}).encode()),dtype=torch.uint8)
        save_file(t,f)
    print("FULLPREC layers multiplied in int8 although the file forbids:", sum(len(v) for v in int8_layers(open_expert(files["high"])).values()))
