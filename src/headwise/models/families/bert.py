"""BERT and the sentence encoders derived from it (MiniLM, BGE, E5): attention without a causal mask."""

from headwise.models.families.base import Family, renamed

FAMILY = Family(
    model_type="bert",
    layer="bert.encoder.layer.{layer}",
    attention="bert.encoder.layer.{layer}.attention",
    layout=renamed(q_proj="self.query", k_proj="self.key", v_proj="self.value", o_proj="output.dense"),
    stock_kv_heads=False,
    output="output.dense",
    hosted="self",
    emptied=("output.dense",),
    dropout="attention_probs_dropout_prob",
    autos=(
        "AutoModel",
        "AutoModelForMaskedLM",
        "AutoModelForSequenceClassification",
        "AutoModelForTokenClassification",
    ),
    renamed={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
    buffers=("embeddings.position_ids",),
)
