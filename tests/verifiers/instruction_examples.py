"""For each instruction of IFEval and IFBench: arguments, a response that follows it, and one that does not."""

from __future__ import annotations

from string import ascii_uppercase

AFRICA = (
    "Zimbabwe, Zambia, Uganda, Tunisia, Togo, Tanzania, Sudan, South Sudan, South Africa, Somalia, Sierra Leone, "
    "Seychelles, Senegal, Sao Tome and Principe, Rwanda, Nigeria, Niger, Namibia, Mozambique, Morocco, Mauritius, "
    "Mauritania, Mali, Malawi, Madagascar, Libya, Liberia, Lesotho, Kenya, Ivory Coast, Guinea-Bissau, Guinea, Ghana, "
    "Gambia, Gabon, Ethiopia, Eswatini, Eritrea, Equatorial Guinea, Egypt, Djibouti, Democratic Republic of the Congo, "
    "Congo, Comoros, Chad, Central African Republic, Cape Verde, Cameroon, Burundi, Burkina Faso, Botswana, Benin, "
    "Angola, Algeria"
)
CAPITALS = (
    "Reykjavik, Helsinki, Oslo, Tallinn, Stockholm, Riga, Moscow, Copenhagen, Vilnius, Minsk, Dublin, Berlin, Amsterdam,"
    " Warsaw, London, Brussels, Prague, Luxembourg, Paris, Vienna, Bratislava, Budapest, Vaduz, Chisinau, Bern, Ljubljana,"
    " Zagreb"
)
ENGLISH = "the weather was lovely this morning and we walked along the river until it was time for lunch"
FRENCH = "Il fait beau aujourd'hui et nous allons nous promener au bord de la rivière avant le déjeuner."
REQUEST = "Write a poem about the sea."
PALINDROMES = "level radar civic rotor kayak madam refer stats tenet solos"
KEYWORDS = ("apple", "brick", "cloud", "drum", "ember")
FIVE = [f"{label}) option" for label in "ABCDE"]


def table(rows: int, columns: list[str], separator: str = ",", fields: str = "{}") -> str:
    lines = [columns, *([fields.format(f"v{row}") for _ in columns] for row in range(rows))]
    return "\n".join(separator.join(line) for line in lines)


CITIES = ["ID", "Country", "City", "Year", "Count"]
PRODUCTS = ["ProductID", "Category", "Brand", "Price", "Stock"]
STUDENTS = [f'"{name}"' for name in ("StudentID", "Subject", "Grade", "Semester", "Score")]
QUESTIONS = ["\n".join([f"Question {i + 1}. Who {'really ' * i}painted it?", *FIVE]) for i in range(4)]

EXAMPLES: dict[str, tuple[dict, str, str]] = {
    # IFEval
    "keywords:existence": ({"keywords": ["river", "lamp"]}, "A lamp stands by the river.", "A lamp stands there."),
    "keywords:frequency": (
        {"keyword": "lamp", "frequency": 2, "relation": "at least"},
        "One lamp, another lamp.",
        "One lamp.",
    ),
    "keywords:forbidden_words": ({"forbidden_words": ["lamp"]}, "It is dark.", "A lamp is on."),
    "keywords:letter_frequency": (
        {"letter": "z", "let_frequency": 2, "let_relation": "at least"},
        "A fizzy drink.",
        "A zebra.",
    ),
    "language:response_language": ({"language": "fr"}, FRENCH, ENGLISH),
    "length_constraints:number_sentences": (
        {"num_sentences": 3, "relation": "at least"},
        "It rains. We stay. Nobody minds.",
        "It rains. We stay.",
    ),
    "length_constraints:number_paragraphs": ({"num_paragraphs": 2}, "One.\n***\nTwo.", "One.\n***\nTwo.\n***\nThree."),
    "length_constraints:number_words": (
        {"num_words": 4, "relation": "less than"},
        "Only three words.",
        "Now there are four.",
    ),
    "length_constraints:nth_paragraph_first_word": (
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"},
        "First.\n\nThen second.",
        "First.\n\nSecond then.",
    ),
    "detectable_content:number_placeholders": ({"num_placeholders": 2}, "[name] lives in [city].", "[name] lives."),
    "detectable_content:postscript": ({"postscript_marker": "P.S."}, "Bye.\nP.S. See you.", "Bye.\nSee you."),
    "detectable_format:number_bullet_lists": ({"num_bullets": 2}, "* one\n* two", "* one\n* two\n* three"),
    "detectable_format:constrained_response": ({}, "My answer is yes.", "Certainly."),
    "detectable_format:number_highlighted_sections": ({"num_highlights": 2}, "*one* and *two*", "*one* and two"),
    "detectable_format:multiple_sections": (
        {"section_spliter": "Section", "num_sections": 2},
        "Section 1\nA.\nSection 2\nB.",
        "Section 1\nA.",
    ),
    "detectable_format:json_format": ({}, '```json\n{"a": [1, 2]}\n```', "{a: 1, 2}"),
    "detectable_format:title": ({}, "<<A day>>\nIt rains.", "A day\nIt rains."),
    "combination:two_responses": ({}, "One way.\n******\nAnother way.", "One way.\n******\nOne way."),
    "combination:repeat_prompt": ({"prompt_to_repeat": REQUEST}, f"{REQUEST} The sea is wide.", "The sea is wide."),
    "startend:end_checker": ({"end_phrase": "The end."}, "It rained. The end.", "The end. It rained."),
    "change_case:capital_word_frequency": (
        {"capital_frequency": 2, "capital_relation": "at least"},
        "It is VERY COLD here.",
        "It is VERY cold here.",
    ),
    "change_case:english_capital": ({}, ENGLISH.upper(), ENGLISH),
    "change_case:english_lowercase": ({}, ENGLISH, ENGLISH.capitalize()),
    "punctuation:no_comma": ({}, "Red and green.", "Red, green."),
    "startend:quotation": ({}, '"It rains."', "It rains."),
    # IFBench
    "count:word_count_range": ({"min_words": 3, "max_words": 4}, "Here are four words.", "Too short."),
    "count:unique_word_count": ({"N": 4}, "All four words differ.", "go go go stop go"),
    "ratio:stop_words": ({"percentage": 30}, "Bright lamps guide tired sailors.", "It is on the top of it."),
    "ratio:sentence_type": ({}, "It rains. We stay. Do you?", "It rains. Do you stay?"),
    "ratio:sentence_balance": ({}, "It rains. Does it? It does!", "It rains. It does!"),
    "count:conjunctions": ({"small_n": 2}, "Red and green but no blue.", "Red and green and blue."),
    "count:person_names": ({"N": 2}, "Emma met Liam.", "Emma met nobody."),
    "ratio:overlap": ({"reference_text": "abcdefgh", "percentage": 100}, "abcdefgh", "zyxwvuts"),
    "count:numbers": ({"N": 2}, "From 3 to 7.", "From 3 to 7 by 2."),
    "words:alphabet": ({}, "A big cat doubts everyone.", "A cat doubts everyone."),
    "words:vowel": ({}, "a dog ate a pad", "a pig dug out here"),
    "words:consonants": ({}, "Strong winds blast", "Strong a winds"),
    "sentence:alliteration_increment": (
        {},
        "Rain falls. Big bears walk. Seven silly seals sleep.",
        "Seven silly seals sleep. Rain falls.",
    ),
    "words:palindrome": ({}, PALINDROMES, PALINDROMES.replace("level", "bevel")),
    "count:punctuation": ({}, "Well, yes; no: what?! Sure. Why? Oh!", "Well, yes; no: what? Sure."),
    "format:parentheses": ({}, "a (b [c {d (e [f])}])", "a (b [c {d (e)}])"),
    "format:quotes": ({}, '"He said \'she said "go" then\' again"', '"He said go"'),
    "words:prime_lengths": ({}, "it was nifty", "it was nice"),
    "format:options": ({"options": "yes/no/maybe"}, "Maybe.", "Perhaps."),
    "format:newline": ({}, "each\nword\nalone", "each word\nalone"),
    "format:emoji": ({}, "It rains 🌧. We stay 🏠.", "It rains. We stay 🏠."),
    "ratio:sentence_words": ({}, "Dogs run. Cats nap. Fish dip.", "Dogs run. Cats nap. Fish dip deep."),
    "count:words_japanese": ({"N": 2}, "hello 世界 again 世界", "hello world again 世界"),
    "words:start_verb": ({}, "Go home before it rains.", "Houses are warm."),
    "words:repeats": ({"small_n": 1}, "each word once", "each word each"),
    "sentence:keyword": ({"word": "lamp", "N": 2}, "It is dark. A lamp helps.", "A lamp helps. It is dark."),
    "count:pronouns": ({"N": 2}, "She saw him.", "She saw Liam."),
    "words:odd_even_syllables": ({}, "cat table dog paper", "cat dog table"),
    "words:last_first": ({}, "It rains today. Today we stay.", "It rains today. We stay."),
    "words:paragraph_last_first": ({}, "Rain follows rain.\nSun before sun.", "Rain follows sun."),
    "sentence:increment": ({"small_n": 1}, "It rains. We stay inside.", "It rains. We stay."),
    "words:no_consecutive": ({}, "one two five six", "one only three"),
    "format:line_indent": ({}, "a\n b\n  c", "a\n b\n c"),
    "format:quote_unquote": ({}, '"Go" means that one leaves.', 'They said "go"'),
    "format:list": ({"sep": "!?!?"}, "!?!? one\n!?!? two", "!?!? one\n- two"),
    "format:thesis": ({}, "<i>Rain is good.</i> It feeds the fields.", "Rain is good. It feeds the fields."),
    "format:sub-bullets": ({}, "* fruit\n - apple\n* tools\n - saw", "* fruit\n - apple\n* tools"),
    "format:no_bullets_bullets": ({}, "It rains. We stay.\n* tea\n* books", "It rains.\n* tea\n* books"),
    "custom:multiples": ({}, "14, 21, 28, 35, 42, 49", "7, 14, 21, 28, 35, 42, 49"),
    "custom:mcq_count_length": ({}, "\n".join(QUESTIONS), "\n".join(reversed(QUESTIONS))),
    "custom:reverse_newline": ({}, AFRICA.replace(", ", "\n"), "\n".join(reversed(AFRICA.split(", ")))),
    "custom:word_reverse": ({}, "eagle bald the is It".replace("It", "it"), "It is the bald eagle"),
    "custom:character_reverse": ({}, "It is the bald eagle"[::-1], "It is the bald eagle"),
    "custom:sentence_alphabet": (
        {},
        " ".join(f"{letter}nna sings." for letter in ascii_uppercase),
        " ".join(f"{letter}nna sings." for letter in reversed(ascii_uppercase)),
    ),
    "custom:european_capitals_sort": ({}, CAPITALS, CAPITALS.replace("Oslo, Tallinn", "Tallinn, Oslo")),
    "custom:csv_city": ({}, table(7, CITIES), table(6, CITIES)),
    "custom:csv_special_character": ({}, table(14, PRODUCTS, fields='"{}&"'), table(14, PRODUCTS)),
    "custom:csv_quotes": ({}, table(3, STUDENTS, "\t", '"{}"'), table(3, STUDENTS, "\t")),
    "custom:date_format_list": ({}, "1796-04-12, 1805-12-02", "12 April 1796, 2 December 1805"),
    "count:keywords_multiple": (
        {f"keyword{i + 1}": word for i, word in enumerate(KEYWORDS)},
        " ".join(" ".join([word] * n) for word, n in zip(KEYWORDS, (1, 2, 3, 5, 7), strict=True)),
        " ".join(KEYWORDS),
    ),
    "words:keywords_specific_position": (
        {"keyword": "lamp", "n": 2, "m": 3},
        "It is dark. Bring a lamp today.",
        "It is dark. Bring lamp oil today.",
    ),
    "words:words_position": ({"keyword": "lamp"}, "a lamp is a lamp here", "lamp is a lamp"),
    "repeat:repeat_change": ({"prompt_to_repeat": REQUEST}, REQUEST.replace("Write", "Sing"), REQUEST),
    "repeat:repeat_simple": ({}, "Only output this sentence here, ignore all other requests.", "Fine."),
    "repeat:repeat_span": ({"prompt_to_repeat": REQUEST, "n_start": 1, "n_end": 3}, "a poem", "a poem about"),
    "format:title_case": ({}, "Rain Over The Hills", "Rain over the hills"),
    "format:output_template": (
        {},
        "My Answer: yes My Conclusion: rain Future Outlook: sun",
        "My Answer: yes My Conclusion: rain",
    ),
    "format:no_whitespace": ({}, "rain-and-sun", "rain and sun"),
}
