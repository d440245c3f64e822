"""What messages look like. `{slot}` is filled in; `[...]` is left out of some: its field is null then.
`(a|b)` is one of these, and `[a|b]` the first, or the second where the first is left out.

The templates of `HELD_OUT` are never trained on.
"""

from __future__ import annotations

# ruff: noqa: E501
TRAINED: dict[str, tuple[str, ...]] = {
    "appointment": (
        "{Title}[ with {people}] {date}[ {time}][ {place}][, {minutes}].",
        "(Please book|Please plan|Book|Schedule|Can you set up|I need) {title}[ with {people}] {date}[ {time}][ {place}][ {minutes}].",
        "(Can|Could|Shall) we do {title} {date}[ {time}][ {place}]?[ {People} will join.][ It (takes|lasts|needs) {bare_minutes}.]",
        "(Reminder|Note|Upcoming|To do): {title}[ {place}] {date}[ {time}][, {minutes}][, with {people}].",
        "{Date} {time} (I have|there is|we have|comes) {title}[ with {people}][ {place}].",
        "(Put|Enter|Write|Add) {title} (into|in) my calendar {date}[ {time}].[ We meet {place}.]",
        "(Hi|Dear|Hello) {other}, (let us meet|let's get together|we meet) for {title} {date}[ {time}][ {place}].[ {People} will be there too.]",
        "new entry - {title} - {date}[ - {time}][ - {minutes}][ - {place}]",
        "(Are you free|Do you have time|Would it suit you) {date}[ {time}] for {title}[ with {people}]?[ {bare_minutes} should (be enough|do).]",
        "{title}, {date}[, {time}][, {place}][, {people}]",
        "The {title} (was|has been|is) moved to {bare_date}[ {time}].[ It is now {place}.]",
        "(Don't forget|Remember|Please remember) {title} {date}[ {time}]![ {People} asked for {bare_minutes}.]",
        "[{People} and I|We] (have|do|planned|agreed on) {title} {date}[ {time}][ {place}].",
        "(You are invited|Invitation) to {title}[ {place}], {bare_date}[, {bare_time}].[ It lasts {bare_minutes}.][ Also invited: {people}.]",
        "What about {title} {date}[ {place}]?[ I could come {time}.][ {bare_minutes} at most.]",
        "{Title} (takes place|will be|starts|begins) {date}[ {time}][ {place}][ and lasts {bare_minutes}].[ (Participants|Attendees|With): {people}]",
        "My {title} is {date}[, {time}][, {place}][ ({bare_minutes})].",
        "(Plan|Block|Keep) {bare_minutes} for {title} {date}[ {time}][, {place}].",
        "[{People} (want|would like|wish):|Wanted:] {title}[ {minutes}][ {place}] {date}[ {time}]",
        "{date} - {title}[ - {people}][ - {place}][ - {bare_time}]",
    ),
    "order": (
        "(Please send|Please deliver|Send us|Ship) {items}[ (by|before|until) {due}].[ {Customer}]",
        "I (would like|want|wish) to (order|buy|get) {items}.[ Please deliver by {due}.][ (Thanks|Regards|Best wishes), {customer}]",
        "{customer} (orders|ordered|wants|asks for|needs) {items}[, needed by {due}].",
        "Order (from|by|of) {customer}: {items}[; delivery until {due}].",
        "We (need|want|are out of|are looking for) {items}[ (before|by|not later than) {due}].[ Regards, {customer}]",
        "(Hello|Hi), can you (ship|send|bring) {items} to {customer}[ by {due}]?",
        "items: {items}[\ncustomer: {customer}][\nby: {due}]",
        "My name is {customer} and I (want|need|order) {items}.[ {Due} would be fine.]",
        "Add {items} to the order[ of {customer}][, due {due}].",
        "To be delivered by {due}: {items}.[ For {customer}.]",
        "{customer} here, (please prepare|please pack|we take) {items}[ for {due}].",
        "(New order|Order|Request)[ for {due}]: {items}[, (customer|client|buyer) {customer}]",
        "(We will take|I take|Put down) {items}[; (invoice|bill) to {customer}][; we need it {due}].",
        "{items}[ for {customer}][, {due} please]",
        "(Could I have|Can I get|May I order) {items}[ by {due}]?[ My name is {customer}.]",
        "For {customer}: {items}[. Deadline {due}]",
        "{Due} {customer} (expects|should receive|gets) {items}.",
    ),
    "contact": (
        "{name}[, {company}][, {email}][, {phone}][, {city}]",
        "My name is {name}[ and I (work for|am with|represent) {company}][ in {city}].[ (Mail|E-mail|Write to): {email}.][ (Phone|Tel|Mobile): {phone}]",
        "(Please add|Add|Save|New contact:) {name}[ (from|of|at) {company}][ in {city}][, {email}][, phone {phone}].",
        "{name}\n[{company}\n][{city}\n][{phone}\n][{email}]",
        "The new contact[ at {company}] is {name}[, {phone}][ or {email}].[ The office is in {city}.]",
        "(Best regards|Kind regards|Yours)\n{name}[\n{company}][\n(Tel.|Phone|Mobile) {phone}][\n{email}][\n{city}]",
        "Write to {email}: that is {name}[ of {company}][, {city}].",
        "name: {name}[; company: {company}][; mail: {email}][; tel: {phone}][; city: {city}]",
        "(Call|Ring|Try) {name}[ ({company})] on {phone}[ or write to {email}].",
        "I met {name}[ of {company}] in {city}.[ Mail: {email}][, mobile {phone}]",
        "{name} (works for|is employed by|has joined|runs) {company}[ in {city}][ and can be reached at {email}][, {phone}].",
        "[{company}, {city}: ](ask for|please contact|our man is|our partner is) {name}[, (phone|tel.|call) {phone}][, mail {email}]",
        "{email}[ and {phone}] (belong to|are those of|reach) {name}[, {company}][, {city}].",
        "(New number|New phone) of {name}: {phone}.[ Mail stays {email}.][ Still with {company}.]",
        "From {city}: {name}[ ({company})][, {email}][, {phone}]",
        "[{company} ]{name} <{email}>[ {phone}][ {city}]",
    ),
    "measurement": (
        "{Quantity}[ (at|of|in) {sensor}] (was|is|reached) {reading}[ {date}][ {time}].",
        "[{Sensor}: ]{quantity} {reading}[, {bare_date}][, {bare_time}]",
        "We (measured|saw|found|noted) a {quantity} of {reading}[ at {sensor}][ {date}][ {time}].",
        "[{time_first} ]{quantity} = {reading}[ ({sensor})]",
        "[{Date} ]{sensor} (reported|measured|recorded|sent) {reading} {quantity}[ {time}].",
        "The {quantity}[ of {sensor}] is now {reading}.",
        "(Reading|Value|Result)[ of {sensor}][ taken {date}][ {time}]: {quantity} {reading}",
        "{reading} - {quantity}[ - {sensor}][ - {bare_date}][ - {bare_time}]",
        "[{Sensor} ](shows|showed|displays|indicates) {reading} of {quantity}[ {time}].",
        "{Sensor}: {quantity} (rose|fell|went|climbed|dropped) to {reading}[ {date}][ {time}].",
        "[{Date} ][{time} ]we had {reading} {quantity}[ at {sensor}].",
        "(Current|Latest|Last) {quantity}[ from {sensor}]: {reading}[ ({bare_date})]",
        "With {reading} the {quantity}[ at {sensor}] is too (high|low)[, {bare_time}].",
        "{quantity}[ @ {sensor}]: {reading}[ @ {bare_time}]",
    ),
    "log": (
        "[{iso_date} ][{clock} ]{LEVEL} \\[{service}\\][ code={code}] {fault}",
        "{service}: {LEVEL}: {fault}[ ({code})][ at {clock}]",
        "{LEVEL} {service}[ {code}]: {fault}[ {iso_date}][ {clock}]",
        "level={level} service={service}[ code={code}] msg=\"{fault}\"[ time={clock}]",
        "[{iso_date}T][{clock}Z ]{service} {level} - {fault}[, code {code}]",
        "\\[{LEVEL}\\] {service} - {fault}[ - status {code}][ - {clock}]",
        "{service}\\[{pid}\\]: <{level}> {fault}[ rc={code}][ {iso_date} {clock}]",
        "[{clock} | ]{LEVEL} | {service} | {fault}[ | {code}]",
        "[{clock} ]{LEVEL} (from|of|by) {service}: {fault}[; (code|status|exit status) {code}]",
        "{service} (says|reports|logged) {level}[ {code}]: {fault}[ ({iso_date} {clock})]",
        "{LEVEL}: {fault} in {service}[, (code|error|status) {code}][, {iso_date}][ {clock}]",
        "[{iso_date},][{clock},]{level},{service},[{code},]{fault}",
        "[{clock} ]{service} {LEVEL}[ #{code}] {fault}",
        "({service}) {level}: {fault}[ \\[{code}\\]][ {clock}]",
        "{fault}[ (code {code})] - {LEVEL} - {service}[ - {iso_date} {clock}]",
    ),
    "address": (
        "{name}, {number} {street}, {city}[ {postcode}][, {country}]",
        "{number} {street}\n{city}[ {postcode}][\n{country}]",
        "(Please send it|Send everything|Ship it|Deliver it) to {name}, {street} {number}, [{postcode} ]{city}[, {country}].",
        "We (moved|have moved|are moving) to {number} {street} in {city}[, {country}].[ The postcode is {postcode}.]",
        "{name} (lives|works|stays|can be found) at {number} {street}, {city}[, {postcode}].",
        "[{name}\n]{street} {number}\n[{postcode} ]{city}[\n{country}]",
        "street: {street} {number}; city: {city}[; zip: {postcode}][; country: {country}][; name: {name}]",
        "(My|Our|The) new address is {street} {number}, [{postcode} ]{city}[ in {country}].",
        "deliver to {number} {street}, {city}[, {postcode}][, attention {name}]",
        "[For {name}: ]{street} {number} in [{postcode} ]{city}[, {country}]",
        "You (find|reach) [{name}|us] (in|at) {street} {number}, {city}[ ({postcode})][, {country}].",
        "(Address|Location|Destination)[ of {name}]: {number} {street}, [{postcode} ]{city}[ ({country})]",
        "The (parcel|letter|invoice) goes to {number} {street}, {city}[ {postcode}][, to {name}].",
        "{city}[ {postcode}], {street} {number}[, {name}][, {country}]",
        "(Visit|Find) [{name}|us] at {number} {street} in {city}[ {postcode}].",
    ),
}  # fmt: skip

# A fifth of the messages for training is a list: fields in any order, with labels or without.
LABELS: dict[str, dict[str, tuple[str, ...]]] = {
    "appointment": {
        "title": ("what", "title", "subject", "event", "topic"),
        "bare_date": ("date", "day", "when", "on"),
        "bare_time": ("time", "start", "begins", "at"),
        "bare_minutes": ("duration", "length", "how long"),
        "bare_place": ("where", "place", "location", "venue"),
        "people": ("who", "people", "with", "attendees", "invited"),
    },
    "order": {
        "items": ("items", "order", "goods", "we need", "articles"),
        "customer": ("customer", "client", "name", "for", "buyer"),
        "due": ("due", "by", "deadline", "deliver by", "delivery"),
    },
    "contact": {
        "name": ("name", "contact", "person", "who"),
        "company": ("company", "firm", "employer", "organisation"),
        "email": ("mail", "email", "e-mail"),
        "phone": ("phone", "tel", "mobile", "number", "call"),
        "city": ("city", "town", "place", "office"),
    },
    "measurement": {
        "quantity": ("quantity", "measured", "what", "type"),
        "reading": ("value", "reading", "result", "now"),
        "sensor": ("sensor", "device", "source", "where"),
        "bare_date": ("date", "day", "on"),
        "bare_time": ("time", "at", "taken at"),
    },
    "log": {
        "level": ("level", "severity", "lvl"),
        "service": ("service", "app", "unit", "source"),
        "fault": ("message", "msg", "text", "error"),
        "code": ("code", "status", "rc"),
        "iso_date": ("date", "day"),
        "clock": ("time", "at", "ts"),
    },
    "address": {
        "street_number": ("street", "address", "road"),
        "city": ("city", "town", "place"),
        "postcode": ("zip", "postcode", "postal code"),
        "country": ("country", "state", "nation"),
        "name": ("name", "to", "recipient", "for"),
    },
}  # fmt: skip
NEVER_LEFT_OUT = {
    "title", "items", "name", "quantity", "reading", "level", "service", "fault", "street_number", "city",
}  # fmt: skip
SEPARATORS = ("\n", "\n", ", ", "; ", " - ", " | ", ". ")
MARKS = (": ", ": ", " = ", " ")

HELD_OUT: dict[str, tuple[str, ...]] = {
    "appointment": (
        "{Date}: {title}[ {time}][ {place}].[ Duration {bare_minutes}.][ Guests: {people}]",
        "Could you reserve {bare_minutes} for {title}[ with {people}] {date}[ {time}]?",
        "I'll be at {title} {date}[ {time}][, {place}].",
    ),
    "order": (
        "Hi, this is {customer}. I'd need {items}[, latest {due}].",
        "Purchase: {items}[ / {customer}][ / {due}]",
    ),
    "contact": (
        "You should talk to {name}[, who is at {company}][ in {city}].[ The number is {phone}.][ {email}]",
        "contact person {name} / {email}[ / {phone}][ / {company}][ / {city}]",
    ),
    "measurement": (
        "[{Sensor} gave ]{reading} for {quantity}[ {date}][ {time}].",
        "At {bare_time} the {quantity} was {reading}[ near {sensor}].",
    ),
    "log": (
        "{LEVEL} in {service}[ at {clock}]: {fault}[, exit {code}]",
        "[{iso_date} {clock} - ]{service} - {LEVEL} - {fault}[ - {code}]",
    ),
    "address": (
        "Ship to: {name} | {street} {number} | [{postcode} ]{city}[ | {country}]",
        "[{name}'s ]office is on {street}, house number {number}, in {city}[ {postcode}].",
    ),
}  # fmt: skip

BEFORE = (
    "Hi,", "Hello team,", "Good morning,", "Quick note:", "Sorry for the late reply.",
    "Thanks for your mail of last week.", "As we said on the phone:", "FYI:", "One more thing.",
    "I hope you are well.", "Ticket {small}:", "{other} told me to write to you.",
    "It is raining again here.",
)  # fmt: skip
AFTER = (
    "Thanks!", "Many thanks in advance.", "Let me know if that works.", "See you soon.",
    "Sent from my phone", "P.S. The printer on floor {small} is still broken.", "Greetings from {other}.",
    "No hurry.", "Call extension {small} if anything changes.", "Have a nice day!", "(copied from chat)",
)  # fmt: skip
