//! Macro that declares sections and keys.

/// Declares a section: a struct with one field per key, its defaults, and a table that describes it.
///
/// A key is written `name: Type = default, in low => high;` (the range is optional), with its documentation
/// above; a choice among words is written `name: String = "a".to_owned(), one_of &["a", "b"];`. `live = true`
/// at the end means that a running gateway takes a changed value as soon as the file has it.
macro_rules! section {
    (
        $(#[doc = $section_doc:literal])*
        $name:ident, $path:literal {
            $( $(#[doc = $doc:literal])* $key:ident : $type:ty = $default:expr $(, in $low:expr => $high:expr)? $(, one_of $words:expr)? $(, live = $live:literal)? ; )*
        }
    ) => {
        $(#[doc = $section_doc])*
        #[derive(Debug, Clone, PartialEq)]
        pub struct $name {
            $( $(#[doc = $doc])* pub $key: $type, )*
        }

        impl Default for $name {
            fn default() -> Self {
                Self { $( $key: $default, )* }
            }
        }

        impl crate::load::Section for $name {
            const PATH: &'static str = $path;

            fn doc() -> String {
                crate::macros::joined(&[$($section_doc),*])
            }

            fn keys() -> Vec<crate::load::Key<Self>> {
                let defaults = Self::default();
                vec![ $( {
                    // A key without a range or words leaves the first value as it is.
                    #[allow(unused_mut, unused_assignments)]
                    let mut range: crate::value::Range<$type> = (None, None);
                    $( range = (Some($low), Some($high)); )?
                    #[allow(unused_mut, unused_assignments)]
                    let mut words: &'static [&'static str] = &[];
                    $( words = $words; )?
                    #[allow(unused_mut, unused_assignments)]
                    let mut is_live = false;
                    $( is_live = $live; )?
                    crate::load::Key::new(
                        stringify!($key),
                        crate::macros::joined(&[$($doc),*]),
                        &defaults.$key,
                        range,
                        words,
                        |section: &mut Self, value| section.$key = value,
                        |section: &Self| crate::value::Setting::write(&section.$key),
                    )
                    .live(is_live)
                } ),* ]
            }
        }
    };
}

pub(crate) use section;

/// Joins doc comment lines with spaces.
pub(crate) fn joined(lines: &[&str]) -> String {
    lines.iter().map(|line| line.trim()).collect::<Vec<_>>().join(" ")
}
