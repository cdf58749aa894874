//! Tokenizer and chat templates against what `transformers` gave for the same files
//! (`tests/fixtures/golden/record_golden.py` recorded it).

use std::path::PathBuf;

use router_tokens::{Detokenizer, ModelText};
use serde_json::Value as Json;

fn fixtures() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/golden")
}

fn ids(value: &Json) -> Vec<u32> {
    serde_json::from_value(value.clone()).expect("token ids")
}

fn golden() -> Json {
    let text = std::fs::read_to_string(fixtures().join("tokenizer_golden.json")).expect("fixture");
    serde_json::from_str(&text).expect("JSON")
}

#[test]
fn strings_encode_and_decode_as_recorded() {
    let text = ModelText::from_folder(&fixtures().join("llama")).expect("model folder");
    let golden = golden();
    let strings = golden["strings"].as_array().expect("strings");
    assert!(strings.len() >= 10);
    for case in strings {
        let input = case["text"].as_str().expect("text");
        let plain = text.tokenizer.encode(input, false).expect("encodes");
        assert_eq!(plain, ids(&case["ids"]), "{input:?}");
        let framed = text.tokenizer.encode(input, true).expect("encodes");
        assert_eq!(framed, ids(&case["ids_with_special"]), "{input:?}");
        for (skip, field) in [(false, "decoded"), (true, "decoded_skip_special")] {
            assert_eq!(text.tokenizer.decode(&framed, skip), case[field].as_str().expect("text"));
            let mut stream = Detokenizer::new(text.tokenizer.clone(), skip, &[]);
            let mut streamed: String = framed.iter().map(|&id| stream.push(id)).collect();
            streamed.push_str(&stream.finish());
            assert_eq!(streamed, case[field].as_str().expect("text"), "streamed {input:?}");
        }
        let bytes: Vec<u8> = framed.iter().flat_map(|&id| text.tokenizer.bytes_of(id)).collect();
        assert_eq!(String::from_utf8_lossy(&bytes), case["decoded"].as_str().expect("text"), "bytes");
        let within: Vec<u8> = plain.iter().flat_map(|&id| text.tokenizer.bytes_within(id)).collect();
        assert_eq!(
            String::from_utf8_lossy(&within),
            text.tokenizer.decode(&plain, false),
            "bytes within a text"
        );
    }
}

#[test]
fn chats_render_as_recorded() {
    let golden = golden();
    let mut renders = 0;
    for chat in golden["chats"].as_array().expect("chats") {
        for render in chat["renders"].as_array().expect("renders") {
            let model = render["model"].as_str().expect("model");
            let text = ModelText::from_folder(&fixtures().join(model)).expect("model folder");
            let mut extras = render["options"].as_object().cloned().expect("options");
            let prompt = extras.remove("add_generation_prompt").and_then(|value| value.as_bool());
            let prompt = prompt.unwrap_or(false);
            let rendered = text.render_chat(&chat["messages"], prompt, &extras).expect("renders");
            assert_eq!(rendered, render["text"].as_str().expect("text"), "{model}");
            let encoded = text.tokenizer.encode(&rendered, false).expect("encodes");
            assert_eq!(encoded, ids(&render["ids"]), "{model}");
            renders += 1;
        }
    }
    assert!(renders >= 30, "only {renders} renders were checked");
}
